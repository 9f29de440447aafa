"""Writes the reports of the node's pools to `$KV.st.<node>._pools` (ADR 0060)."""

import asyncio
import logging
from collections.abc import Iterable

from virtbus.bus.client.ports import Bus, EntryKind
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.pool import POOLS_MAX, NodePools, PoolReport
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""The pause after a write. Pool sizes change often, and placement does not need each change."""


class PoolsReport:
    """Writes the latest reports of all pools if they differ from the stored reports."""

    def __init__(self, bus: Bus, node: str, pause_s: float = PAUSE_S) -> None:
        self._bus = bus
        self._node = node
        self._pause_s = pause_s
        self._pools: dict[str, tuple[PoolReport, ...]] = {}
        """The latest reports by source: imaged, or the agent's own probes."""
        self._wake = asyncio.Event()

    def tell(self, source: str, pools: Iterable[PoolReport]) -> None:
        """Replace the reports of one source."""
        found = tuple(pools)
        if found != self._pools.get(source):
            self._pools[source] = found
            self._wake.set()

    async def run(self) -> None:
        """Write the pools on each change; never returns by itself."""
        stored: bytes | None = None
        while True:
            await self._wake.wait()
            self._wake.clear()
            every = {one.name: one for pools in self._pools.values() for one in pools}
            pools = tuple(every[name] for name in sorted(every)[:POOLS_MAX])
            try:
                value = encode(NodePools(node=self._node, pools=pools))
                stored = await self._read() if stored is None else stored
                if value != stored:
                    await self._bus.put(subjects.node_pools(self._node), value)
                    stored = value
            except BusError as error:
                extra = {"code": "pools_late"}
                log.info("cannot write the pools of the node: %s", error, extra=extra)
                stored = None
                self._wake.set()
            except (OverflowError, ValueError) as error:  # no retry before the next change
                extra = {"code": "pools_unwritable"}
                log.error("the reports of the pools fit no message: %s", error, extra=extra)
            await asyncio.sleep(self._pause_s)

    async def _read(self) -> bytes:
        entry = await self._bus.get(subjects.node_pools(self._node))
        return entry.value if entry is not None and entry.kind is EntryKind.PUT else b""
