"""Keeps the reach of guests up to date: hosts of the fleet come and go, and so do bus servers."""

import asyncio
import logging
from dataclasses import replace

from virtbus.bus.ports import Entry, EntryKind
from virtbus.netd.core.reach import MAX_ADDRESSES, usable
from virtbus.netd.edge.bus_servers import server_addresses
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.settings import Settings
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.wire import read

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between looks at the names of the bus' servers, whose addresses may change."""


class Closing:
    """The addresses that `_hosts` names, and those of the bus' servers, are closed to guests."""

    def __init__(self, bridge: HostBridge, settings: Settings) -> None:
        self._bridge = bridge
        self._settings = settings
        self._hosts: tuple[str, ...] = ()
        self._changed = asyncio.Event()

    def see(self, entry: Entry) -> None:
        """Take in what stands at the node's `_hosts`; what cannot be read changes nothing."""
        if entry.kind is not EntryKind.PUT:
            return  # a node that is forgotten; its guests keep what was closed
        try:
            self._hosts = read(HostAddresses, entry.value).fleet
        except VirtbusError as error:
            log.error("%s cannot be read: %s", entry.key, error, extra={"code": "bad_record"})
            return
        if len(self._hosts) > MAX_ADDRESSES:
            log.error("only %d addresses are closed", MAX_ADDRESSES, extra={"code": "too_many"})
        self._changed.set()

    async def run(self) -> None:
        """Apply each change; never returns by itself."""
        while True:
            self._changed.clear()
            try:
                await in_thread(self._apply)
            except OSError as error:
                log.warning("reach not changed: %s", error, extra={"code": "reach_failed"})
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _apply(self) -> None:
        """Blocks: names are resolved, and nftables is written where something changed."""
        addresses = [*self._hosts, *server_addresses(self._settings.bus())]
        hosts = usable(addresses, self._bridge.gateway.network)
        self._bridge.close(replace(self._settings.reach(), hosts=hosts))
