"""Purges the statuses of deleted VMs that a killed agent left on the bus."""

import asyncio
import logging

from virtbus.bus.client.ports import Bus, EntryKind
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects

log = logging.getLogger(__name__)

MARKER_TTL_S = 86_400
RETRY_S = 2.0
LOOKED_KEPT = 10_000
"""The number of remembered uids. Each list of records reads the statuses of other uids again."""


class StatusCollector:
    """Purges the status of each VM whose record is purged and that has no actor."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._looked: dict[str, None] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def purged(self, uid: str) -> None:
        """Schedule the purge of the status of `uid`; do nothing for a remembered uid."""
        if uid not in self._looked:
            self._looked[uid] = None
            if len(self._looked) > LOOKED_KEPT:
                del self._looked[next(iter(self._looked))]
            self._queue.put_nowait(uid)

    async def run(self) -> None:
        """Purge the scheduled statuses one after the other; never returns."""
        while True:
            uid = await self._queue.get()
            try:
                await purge_status(self._bus, self._node, uid)
            except BusError as error:
                log.info(
                    "cannot purge a status: %s", error, extra={"code": "status_left", "uid": uid}
                )
                self._queue.put_nowait(uid)
                await asyncio.sleep(RETRY_S)


async def purge_status(bus: Bus, node: str, uid: str) -> None:
    """Purge the status of a VM if there is one; raises BusError."""
    key = subjects.vm_status(node, uid)
    entry = await bus.get(key)
    if entry is not None and entry.kind is EntryKind.PUT:
        await bus.purge(key, marker_ttl_s=MARKER_TTL_S)
