"""Writes the addresses of all hosts to a key of each node; the node blocks them for its guests.

Nodes report their addresses in the heartbeat. The last addresses of a silent node stay in its own
key until the node is forgotten. A key is written only on change.
"""

import asyncio
import logging
from typing import NoReturn

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.records import read_stored
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Changes within this time are combined into one write per node."""
ADDRESS_CHARACTERS = 45
"""Maximum length of an address (IPv6). A node must not fill the keys with longer texts."""
PER_HOST = 32
"""Limit of addresses per host, because each address becomes unreachable for all guests."""


class FleetAddresses:
    """The leader task that writes the key `_hosts` of each node."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._stored: dict[str, tuple[HostAddresses, int]] = {}

    async def run(self, tenure: LeaderTerm) -> NoReturn:
        """Watch the stored keys, and write those that differ, while the fleet lease is held."""
        self._stored.clear()
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(listed))
            while True:
                await listed.wait()
                tenure.check()
                await self._write()
                await asyncio.sleep(LOOK_S)

    async def _follow(self, listed: asyncio.Event) -> None:
        async with self._bus.watch(subjects.hosts_all()) as watch:
            async for item in watch:
                if item is WatchMark.RESET:
                    # A restored bus may lack keys, and has other revisions. A `_write` under way
                    # continues with the old dict.
                    self._stored = {}
                    listed.clear()
                elif item is WatchMark.SYNCED:
                    listed.set()
                elif isinstance(item, Entry):
                    self._see(item)

    def _see(self, entry: Entry) -> None:
        node = entry.key.split(".")[2]
        known = self._stored.get(node)
        if known is not None and known[1] >= entry.revision:
            return
        if entry.kind is not EntryKind.PUT:
            self._stored.pop(node, None)
            return
        try:
            there = read_stored(HostAddresses, entry.key, entry.value)
        except VirtbusError as error:
            log.error("unreadable %s: %s", entry.key, error, extra={"code": "bad_record"})
            there = HostAddresses(node=node)  # differs from the desired value: `_write` replaces it
        self._stored[node] = (there, entry.revision)

    def wanted(self) -> dict[str, HostAddresses]:
        """Return the desired value of each node's key.

        While no host has addresses, only nodes that already have a key are included.
        """
        own = {node: there.own for node, (there, _) in self._stored.items()}
        for node, seen in self._fleet.nodes.items():
            if seen.record.addresses:
                named = (one for one in seen.record.addresses if len(one) <= ADDRESS_CHARACTERS)
                own[node] = tuple(named)[:PER_HOST]
        fleet = tuple(sorted({address for addresses in own.values() for address in addresses}))
        nodes = own.keys() | (self._fleet.nodes.keys() if fleet else set())
        return {
            node: HostAddresses(node=node, own=own.get(node, ()), fleet=fleet) for node in nodes
        }

    async def _write(self) -> None:
        stored = self._stored
        for node, wanted in self.wanted().items():
            there, revision = stored.get(node, (None, 0))
            if wanted == there:
                continue
            key = subjects.node_hosts(node)
            try:
                if revision == 0:
                    entry = await self._bus.get(key)
                    revision = entry.revision if entry is not None else 0
                revision = await self._bus.put(key, encode(wanted), expect=revision)
            except ConflictError:
                continue  # another controller was first; the watch delivers its write
            except BusError as error:
                log.info("%s: %s", key, error, extra={"code": "hosts_late"})
                return
            if stored.get(node, (None, 0))[1] < revision:  # otherwise the watch has a later write
                stored[node] = (wanted, revision)
