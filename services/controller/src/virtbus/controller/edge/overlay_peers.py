"""Writes for each node its peers in overlay networks, as a leader task.

Each key is for a node, a network and a peer: another host that has guests of the network. A new
guest therefore costs one write for each peer. Changes of a key within LOOK_S are combined into one
write.
"""

import asyncio
import logging
from contextlib import suppress
from typing import NoReturn

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.overlay_members import peers_wanted
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas.overlay import OverlayPeer
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

LOOK_S = 1.0
MARKER_TTL_S = 24 * 3600


class OverlayPeers:
    """The leader task that writes the keys `_peer`."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def run(self, tenure: LeaderTerm) -> NoReturn:
        """Write the keys that differ from the wanted values, while the fleet lease is held."""
        while True:
            tenure.check()
            await self._write(tenure)
            await asyncio.sleep(LOOK_S)

    async def _write(self, tenure: LeaderTerm) -> None:
        nodes = {name: seen.record for name, seen in self._fleet.nodes.items()}
        stored = dict(self._fleet.hosts.peers.items())
        known = {key: one for key, (one, _) in stored.items() if one is not None}
        wanted = peers_wanted(self._fleet.vms.values(), nodes, known)
        try:
            for key, peer in wanted.items():
                there, revision = stored.get(key, (None, 0))
                if there != peer:
                    tenure.check()
                    await self._put(key, peer, revision)
            for key in stored.keys() - wanted.keys():
                tenure.check()
                await self._end(key, stored[key][1])
        except BusError as error:
            log.info("peers of overlays: %s", error, extra={"code": "peers_late"})

    async def _put(self, key: str, peer: OverlayPeer, revision: int) -> None:
        try:
            if revision == 0:
                entry = await self._bus.get(key)
                revision = entry.revision if entry is not None else 0
            await self._bus.put(key, encode(peer), expect=revision)
        except ConflictError:
            return  # another controller was first; the watch delivers its write

    async def _end(self, key: str, revision: int) -> None:
        """Purge the stored value; the next round after its delivery handles a later value."""
        with suppress(ConflictError):
            await self._bus.purge(key, expect=revision, marker_ttl_s=MARKER_TTL_S)
