"""Asks the nodes about the backups in their directories (ADR 0068)."""

import asyncio
from collections.abc import AsyncIterator

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import node_not_found
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupsAsk, HeldBackup, HeldBackups
from virtbus.schemas.wire import validate

ASK_S = 8.0
PAGES = 200
"""Limit of pages that are read from a node."""


class BackupDirectories:
    """The backup directories of all nodes."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    def nodes(self, node: str | None = None) -> tuple[str, ...]:
        """Return the node, or all nodes whose heartbeats arrive; raises VirtbusError 404."""
        if node is not None:
            if node not in self._fleet.nodes:
                raise node_not_found(node)
            return (node,)
        now_s = asyncio.get_running_loop().time()
        nodes = sorted(self._fleet.nodes)
        return tuple(one for one in nodes if not self._fleet.silent(one, now_s))

    async def held(self, node: str) -> AsyncIterator[HeldBackup]:
        """Yield the backups of a node, the oldest first; raises BusError, VirtbusError."""
        after = ""
        for _ in range(PAGES):
            page = await self.ask(node, BackupsAsk(after=after))
            for held in page.items:
                yield held
            if not page.more or not page.items:
                return
            after = page.items[-1].id

    async def ask(self, node: str, ask: BackupsAsk) -> HeldBackups:
        """Ask imaged of a node; raises BusError, VirtbusError."""
        subject = subjects.rpc(node, "imaged", "backups")
        return validate(HeldBackups, await self._bus.request(subject, ask, timeout_s=ASK_S))
