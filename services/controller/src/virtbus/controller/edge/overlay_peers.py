"""Writes for each node its peers in overlay networks, as a leader task.

Each key is for a node, a network and a peer: another host that has guests of the network. A new
guest therefore costs one write for each peer. Changes of a key within LOOK_S are combined into one
write.
"""

import asyncio
import logging
from typing import NoReturn

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.overlay_members import peers_wanted
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.overlay import OverlayPeer
from virtbus.schemas.records import read_stored
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

LOOK_S = 1.0
MARKER_TTL_S = 24 * 3600


class OverlayPeers:
    """The leader task that writes the keys `_peer`."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._stored: dict[str, tuple[OverlayPeer | None, int]] = {}
        """By key: the value, None if unreadable, and its revision."""

    async def run(self, tenure: LeaderTerm) -> NoReturn:
        """Watch the stored keys, and write those that differ, while the fleet lease is held."""
        self._stored = {}
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(listed))
            while True:
                await listed.wait()
                tenure.check()
                await self._write(tenure)
                await asyncio.sleep(LOOK_S)

    async def _follow(self, listed: asyncio.Event) -> None:
        async with self._bus.watch(subjects.overlay_peers_all()) as watch:
            async for item in watch:
                if item is WatchMark.RESET:
                    # A restored bus may lack keys. A `_write` under way continues with the old
                    # dict, so that it does not add outdated revisions to the new dict.
                    self._stored = {}
                    listed.clear()
                elif item is WatchMark.SYNCED:
                    listed.set()
                elif isinstance(item, Entry):
                    self._see(item)

    def _see(self, entry: Entry) -> None:
        known = self._stored.get(entry.key)
        if known is not None and known[1] >= entry.revision:
            return
        if entry.kind is not EntryKind.PUT:
            self._stored.pop(entry.key, None)
            return
        there: OverlayPeer | None = None
        try:
            there = read_stored(OverlayPeer, entry.key, entry.value)
        except VirtbusError as error:
            log.error("unreadable %s: %s", entry.key, error, extra={"code": "bad_record"})
        self._stored[entry.key] = (there, entry.revision)

    async def _write(self, tenure: LeaderTerm) -> None:
        nodes = {name: seen.record for name, seen in self._fleet.nodes.items()}
        stored = self._stored
        known = {key: one for key, (one, _) in stored.items() if one is not None}
        wanted = peers_wanted(self._fleet.vms.values(), nodes, known)
        try:
            for key, peer in wanted.items():
                if known.get(key) != peer:
                    tenure.check()
                    await self._put(key, peer, stored)
            for key in stored.keys() - wanted.keys():
                tenure.check()
                await self._end(key, stored)
        except BusError as error:
            log.info("peers of overlays: %s", error, extra={"code": "peers_late"})

    async def _put(
        self, key: str, peer: OverlayPeer, stored: dict[str, tuple[OverlayPeer | None, int]]
    ) -> None:
        revision = stored.get(key, (None, 0))[1]
        try:
            if revision == 0:
                entry = await self._bus.get(key)
                revision = entry.revision if entry is not None else 0
            stored[key] = (peer, await self._bus.put(key, encode(peer), expect=revision))
        except ConflictError:
            return  # another controller was first; the watch delivers its write

    async def _end(self, key: str, stored: dict[str, tuple[OverlayPeer | None, int]]) -> None:
        """Purge the stored value; the next round after its delivery handles a later value."""
        if key not in stored:
            return  # purged meanwhile
        try:
            await self._bus.purge(key, expect=stored[key][1], marker_ttl_s=MARKER_TTL_S)
        except ConflictError:
            return
        stored.pop(key, None)
