"""Closes the addresses of the fleet's hosts and of bus servers to this host's guests."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.netd.core.reach import MAX_ADDRESSES, usable
from virtbus.netd.edge.bus_servers import server_addresses
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.hosts_file import HostsFile
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.names_keeper import NamesKeeper
from virtbus.netd.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.address_pool import Net
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.records import read_stored

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""The interval of DNS lookups of the bus servers' names."""


class ForbiddenAddresses:
    """Closes the addresses in the node's `_hosts` key, and those of this host and the bus servers.

    A file keeps the last addresses, so that a netd without the bus closes them, too.
    """

    def __init__(
        self,
        bridges: HostBridges,
        settings: Settings,
        resolver: NamesKeeper,
        guard: Callable[[], Awaitable[None]],
    ) -> None:
        """`guard` applies the built-in bridge's rules to guests on no bridge of virtbus."""
        self._bridges = bridges
        self._guard = guard
        self._file = HostsFile(settings.state_dir / "netd" / "reach" / "hosts.json")
        self._settings = settings
        self._resolver = resolver
        self._hosts: tuple[str, ...] = ()
        self._servers: set[str] = set()
        """The last known addresses of the bus servers; at first, all addresses in the file."""
        self._changed = asyncio.Event()

    def see(self, entry: Entry) -> None:
        """Take a new value of the `_hosts` key. `run` applies it.

        Ignore other keys, deletes and unreadable values. The addresses thus stay closed after the
        node's removal from the fleet.
        """
        if entry.kind is not EntryKind.PUT or not entry.key.endswith(f".{subjects.HOSTS_KEY}"):
            return
        try:
            self._hosts = read_stored(HostAddresses, entry.key, entry.value).fleet
        except VirtbusError as error:
            log.error("%s cannot be read: %s", entry.key, error, extra={"code": "bad_record"})
            return
        if len(self._hosts) > MAX_ADDRESSES:
            log.error("only %d addresses are closed", MAX_ADDRESSES, extra={"code": "too_many"})
        self._changed.set()

    def restore(self) -> None:
        """Set the rules from the file, before any network is made or adopted."""
        reach = self._settings.reach(self._resolver.addresses)
        hosts = usable(self._file.read(), self._guests)
        self._bridges.built_in.reach = replace(reach, hosts=hosts)
        self._servers = set(map(str, hosts))

    async def run(self) -> None:
        """Apply each change, and repeat the DNS lookups. Never returns."""
        while True:
            self._changed.clear()
            try:
                await in_thread(self._apply)
                await self._guard()
            except (VirtbusError, OSError) as error:
                log.warning(
                    "cannot update the closed addresses: %s", error, extra={"code": "reach_failed"}
                )
            await wait_for_event(self._changed, LOOK_S)

    def _apply(self) -> None:
        """Resolve the servers' names, and update nftables after a change. Blocks.

        While a name fails to resolve, the closed addresses of servers stay closed.
        """
        servers, complete = server_addresses(self._settings.bus())
        self._servers = servers if complete else self._servers | servers
        fleet = self._hosts or tuple(map(str, self._bridges.built_in.reach.hosts))
        hosts = usable([*fleet, *self._bridges.addresses(), *self._servers], self._guests)
        reach = self._settings.reach(self._resolver.addresses)
        self._bridges.set_reach(replace(reach, hosts=hosts))
        self._file.write(hosts)

    @property
    def _guests(self) -> list[Net]:
        return self._bridges.built_in.gateways.subnets
