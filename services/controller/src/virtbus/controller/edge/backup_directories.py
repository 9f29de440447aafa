"""Asks the nodes about the backups in their directories (ADR 0068)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.backup_changes import backups_off
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import node_not_found
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupsAsk, HeldBackup, HeldBackups
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

Result = TypeVar("Result")
ASK_S = 8.0
ENABLED_S = 2.0
"""Time limit of the question if a node makes backups. The node answers without reading files."""
AT_ONCE = 32
"""Limit of nodes that are asked at once, because each answer needs memory for up to a page."""
PAGES = 200
"""Limit of pages that are read from one node. Later backups of the node are left out."""


class BackupDirectories:
    """The backup directories of all nodes."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    def nodes(self, node: str | None = None) -> tuple[str, ...]:
        """Return the given node, or all known nodes; a node that is down has backups, too.

        Raises:
            VirtbusError: 404: the given node is unknown.
        """
        if node is None:
            return tuple(self._fleet.known_nodes())
        if not self._fleet.has_node(node):
            raise node_not_found(node)
        return (node,)

    async def each(
        self,
        nodes: Iterable[str],
        work: Callable[[str], Awaitable[Result]],
        until_s: float,
        enough: Callable[[Result], bool] = lambda _: False,
    ) -> dict[str, Result]:
        """Return the results of `work` for the nodes that answer until `until_s` (loop's time).

        The wait ends early when `enough` returns True for a result.
        """
        found: dict[str, Result] = {}
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(node: str) -> None:
            try:
                async with asyncio.timeout_at(until_s), turns:
                    found[node] = await work(node)
            except (BusError, VirtbusError, TimeoutError) as error:
                log.info("no backups of %s: %s", node, error, extra={"code": "backups_unknown"})

        async with background() as tasks:
            for done in asyncio.as_completed([tasks.start(one(node)) for node in nodes]):
                await done
                if any(enough(result) for result in found.values()):
                    break
        return found

    async def held(self, node: str) -> AsyncIterator[HeldBackup]:
        """Yield the backups of a node, the oldest first; raise BusError or VirtbusError."""
        after = ""
        for _ in range(PAGES):
            page = await self.ask(node, BackupsAsk(after=after))
            for held in page.items:
                yield held
            if not page.more or not page.items:
                return
            after = page.items[-1].id

    async def refuse_off(self, node: str) -> None:
        """Raise 422 `backups_off` if the node answers that it has no directory for backups."""
        try:
            known = await self.ask(node, BackupsAsk(do="get"), ENABLED_S)
        except (BusError, VirtbusError) as error:  # accepted: the operation waits for the node
            log.info("%s may make no backups: %s", node, error, extra={"code": "backups_unknown"})
            return
        if not known.enabled:
            raise backups_off(node)

    async def ask(self, node: str, ask: BackupsAsk, timeout_s: float = ASK_S) -> HeldBackups:
        """Return the answer of a node's imaged; raise BusError or VirtbusError."""
        subject = subjects.rpc(node, "imaged", "backups")
        return validate(HeldBackups, await self._bus.request(subject, ask, timeout_s=timeout_s))
