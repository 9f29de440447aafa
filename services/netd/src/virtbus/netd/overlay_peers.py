"""Keeps this host's tunnels up to date with the overlay guests of other hosts."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.netd.attachments import Attachments
from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.netd.edge.attachers import Attachers
from virtbus.netd.edge.namespaces import in_thread
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.overlay import OverlayPeer
from virtbus.schemas.records import read_stored

log = logging.getLogger(__name__)

LOOK_S = 5.0
SETTLES_S = 0.05
"""One write covers all changes within this time."""


class OverlayPeers:
    """Follows the node's `_peer` keys. Each key lists one network's guests on another host, a peer.

    Unreadable values are ignored.
    """

    def __init__(self, attachers: Attachers, attachments: Attachments) -> None:
        self._attachers = attachers
        self._attachments = attachments
        self._changed = asyncio.Event()

    def see(self, entry: Entry) -> None:
        if not entry.key.endswith(f".{subjects.PEER_KEY}"):
            return
        tunnels = self._attachers.tunnels
        if entry.kind is not EntryKind.PUT:
            network, peer = entry.key.split(".")[3:5]
            tunnels.drop_peer(network, peer)
        else:
            try:
                tunnels.set_peer(read_stored(OverlayPeer, entry.key, entry.value))
            except VirtbusError as error:
                extra = {"code": "bad_record"}
                log.error("%s cannot be read: %s", entry.key, error, extra=extra)
                return
        self._changed.set()

    async def run(self, is_complete: Callable[[], bool]) -> None:
        """Write each change. `is_complete` returns True once all keys are known. Never returns."""
        tunnels = self._attachers.tunnels
        while True:
            await wait_for_event(self._changed, LOOK_S)
            listed = is_complete() and not tunnels.complete
            if not (self._changed.is_set() or listed):
                continue
            await asyncio.sleep(SETTLES_S)
            self._changed.clear()
            tunnels.complete = tunnels.complete or listed
            if not await self._write():
                await wait_for_event(self._changed, LOOK_S)
                self._changed.set()

    async def _write(self) -> bool:
        networks: dict[str, list[Nic]] = {}
        for one in self._attachments.ready():
            for nic in one.joined.nics:
                if nic.kind is NicKind.OVERLAY:
                    networks.setdefault(nic.place, []).append(nic)
        mended = await in_thread(lambda: list(map(self._mended, networks.values())))
        return all(mended)

    def _mended(self, nics: Sequence[Nic]) -> bool:
        try:
            self._attachers.verify(nics, mend=True)
        except (VirtbusError, OSError) as error:
            extra = {"code": "peers_failed", "network": nics[0].network}
            log.warning("guests of other hosts are late: %s", error, extra=extra)
            return False
        return True
