"""Writes the addresses of all hosts to a key of each node; the node blocks them for its guests.

Nodes report their addresses in the heartbeat. The last addresses of a silent node stay in its own
key until the node is forgotten. A key is written only on change.
"""

import asyncio
import logging
from typing import NoReturn

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.node import HostAddresses
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

    async def run(self, tenure: LeaderTerm) -> NoReturn:
        """Write the keys that differ from the desired values, while the fleet lease is held."""
        while True:
            tenure.check()
            await self._write()
            await asyncio.sleep(LOOK_S)

    def wanted(self) -> dict[str, HostAddresses]:
        """Return the desired value of each node's key.

        While no host has addresses, only nodes that already have a key are included.
        """
        own = {
            key.split(".")[2]: there.own if there is not None else ()
            for key, (there, _) in self._fleet.hosts.addresses.items()
        }
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
        for node, wanted in self.wanted().items():
            key = subjects.node_hosts(node)
            there, revision = self._fleet.hosts.addresses.at(key)
            if wanted == there:
                continue
            try:
                if revision == 0:
                    entry = await self._bus.get(key)
                    revision = entry.revision if entry is not None else 0
                await self._bus.put(key, encode(wanted), expect=revision)
            except ConflictError:
                continue  # another controller was first; the watch delivers its write
            except BusError as error:
                log.info("%s: %s", key, error, extra={"code": "hosts_late"})
                return
