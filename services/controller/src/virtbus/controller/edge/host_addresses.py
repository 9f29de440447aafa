"""Tells each node the addresses of all hosts, which its guests may not reach.

Nodes name their own in the heartbeat. What a silent one named last stays in its own key, until the
node is forgotten. One key a node, written only where it changes.
"""

import asyncio
import logging
from typing import NoReturn

from virtbus.bus.ports import Bus, BusError, ConflictError, Entry, EntryKind, WatchMark
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.lease import Tenure
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""All changes of a second are one write a node."""
PER_HOST = 32
"""Of one host so many count: a node cannot close the world to the guests of others."""


class FleetAddresses:
    """A duty of the controller with the lease."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._told: dict[str, tuple[HostAddresses, int]] = {}

    async def run(self, tenure: Tenure) -> NoReturn:
        """Follow what stands on the bus, and write what differs, while the lease is held."""
        self._told.clear()
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(listed))
            await listed.wait()
            while True:
                tenure.check()
                await self._tell()
                await asyncio.sleep(LOOK_S)

    async def _follow(self, listed: asyncio.Event) -> None:
        async with self._bus.watch(subjects.hosts_all()) as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    listed.set()
                elif isinstance(item, Entry):
                    self._see(item)

    def _see(self, entry: Entry) -> None:
        node = entry.key.split(".")[2]
        known = self._told.get(node)
        if known is not None and known[1] >= entry.revision:
            return
        if entry.kind is not EntryKind.PUT:
            self._told.pop(node, None)
            return
        try:
            there = read(HostAddresses, entry.value)
        except VirtbusError as error:
            log.error("unreadable %s: %s", entry.key, error, extra={"code": "bad_record"})
            there = HostAddresses(node=node)  # written again below
        self._told[node] = (there, entry.revision)

    def wanted(self) -> dict[str, HostAddresses]:
        """What each node is to be told. Nodes that name no address need no key."""
        own = {node: there.own for node, (there, _) in self._told.items()}
        for node, seen in self._fleet.nodes.items():
            if seen.record.addresses:
                own[node] = seen.record.addresses[:PER_HOST]
        fleet = tuple(sorted({address for addresses in own.values() for address in addresses}))
        nodes = own.keys() | (self._fleet.nodes.keys() if fleet else set())
        return {
            node: HostAddresses(node=node, own=own.get(node, ()), fleet=fleet) for node in nodes
        }

    async def _tell(self) -> None:
        for node, wanted in self.wanted().items():
            there, revision = self._told.get(node, (None, 0))
            if wanted == there:
                continue
            key = subjects.node_hosts(node)
            try:
                if revision == 0:
                    entry = await self._bus.get(key)
                    revision = entry.revision if entry is not None else 0
                revision = await self._bus.put(key, encode(wanted), expect=revision)
            except ConflictError:
                continue  # another controller was first; the watch brings what it wrote
            except BusError as error:
                log.info("%s: %s", key, error, extra={"code": "hosts_late"})
                return
            self._told[node] = (wanted, revision)
