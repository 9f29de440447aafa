"""Follows the addresses that DHCP servers of segments give to this host's guests.

A segment is a layer-2 network outside of virtbus. On a segment's network without a subnet, a guest
may use only the address of its last DHCP lease. netd reads the server's answer on the guest's tap
and stores the address.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.address_assignment import leased
from virtbus.netd.core.dhcp import DhcpLease
from virtbus.netd.edge.namespaces import in_thread
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetReady

log = logging.getLogger(__name__)

_MOST_WAITING = 1024
"""Maximum number of DHCP leases that wait for `run`. Further DHCP leases are dropped: their guests
can use the new addresses only after the next renewal.
"""


class SegmentGuests:
    """Applies segments' DHCP leases, and the reach rules of guests on no bridge of virtbus."""

    def __init__(self, doors: HostPorts, attachments: Attachments) -> None:
        self._bridge = doors.bridge
        self._plugins = doors.attachers.plugin_reach
        self._attachments = attachments
        self._waiting: dict[tuple[str, int], DhcpLease] = {}
        self._wake = asyncio.Event()
        self._unreported: set[str] = set()
        self._applied = asyncio.Event()
        doors.dhcp.leased = self._see

    def _see(self, uid: str, index: int, lease: DhcpLease) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting[uid, index] = lease
            self._wake.set()

    async def run(self) -> None:
        """Apply DHCP leases, also without the bus. Never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                (uid, index), lease = self._waiting.popitem()
                before = self._attachments.state_of(uid)
                try:
                    await self._attachments.amend(
                        uid, partial(leased, index=index, lease=lease, reach=self._bridge.reach)
                    )
                except (VirtbusError, OSError) as error:
                    extra = {"code": "lease_failed", "uid": uid}
                    log.warning("%s is not in use: %s", lease.address, error, extra=extra)
                if self._attachments.state_of(uid) != before:  # possible even after an error
                    self._unreported.add(uid)
                    self._applied.set()

    async def report(self, send: Callable[[NetReady], Awaitable[None]]) -> None:
        """Report VMs with new addresses, including earlier changes. Never returns."""
        while True:
            await self._applied.wait()
            self._applied.clear()
            while self._unreported:
                ready = self._attachments.state_of(self._unreported.pop())
                if ready is not None:
                    await send(ready)

    async def guard(self) -> None:
        """Apply this host's reach rules to guests on no bridge of virtbus.

        A failure at a VM's taps is logged. Raises OSError if the table for CNI guests fails.
        """
        for attachment in self._attachments.ready():
            if not any(nic.filters_reach for nic in attachment.nics):
                continue
            try:
                await self._attachments.amend(attachment.uid, lambda vm: vm)
            except (VirtbusError, OSError) as error:
                extra = {"code": "rules_failed", "uid": attachment.uid}
                log.warning("not all rules of its taps are in force: %s", error, extra=extra)
        await in_thread(self._plugins.sync)
