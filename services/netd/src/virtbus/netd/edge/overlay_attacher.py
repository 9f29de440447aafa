"""Connects interfaces to networks of the kind `overlay`, which span hosts by tunnels.

On each host, a Linux bridge connects the guests, as on a network of the kind `nat`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.own_bridge_attacher import OwnBridgeAttacher
from virtbus.netd.edge.tunnels import Tunnels
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network_object import BRIDGE_MTU
from virtbus.schemas.overlay import ENCAPSULATION_BYTES


@dataclass(frozen=True, slots=True)
class OverlayAttacher:
    """Implements `attacher.Attacher`."""

    bridged: OwnBridgeAttacher
    tunnels: Tunnels

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        """Return the interface with its addresses. Its MTU leaves room for the encapsulation.

        Raises VirtbusError.
        """
        most = min(self.tunnels.plan(nic).mtu - ENCAPSULATION_BYTES, BRIDGE_MTU)
        return self.bridged.plan(nic, vm, used, most)

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """Ensure the bridges and tunnels, with entries for the hosts known so far."""
        self.bridged.prepare(host, nics)
        for nic, macs in self.tunnels.first_of_each(nics):
            self.tunnels.ensure(host, nic)
            self.tunnels.sync(host, nic, macs)

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        self.bridged.attach(host, uid, nics, netns_fd)

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        """Return a message for each unplugged host end, and each missing or wrong tunnel.

        With `mend`, restore both.
        """
        found = self.bridged.verify(nics, mend=mend)
        with Netlink() as host:
            for nic, macs in self.tunnels.first_of_each(nics):
                if mend:
                    self._mend(host, nic, macs)
                else:
                    found += self.tunnels.faults(host, nic, macs)
        return found

    def _mend(self, host: Netlink, nic: Nic, macs: Collection[str]) -> None:
        try:
            self.tunnels.ensure(host, nic)
        except VirtbusError as error:
            self.tunnels.warn(nic, error)
            return
        self.tunnels.sync(host, nic, macs)

    def detach(self, left: Sequence[Nic]) -> None:
        """Add tunnel entries for guests that ended here, if other hosts now list these guests.

        Example: this host was cut off, and its VM was started on another host. The tunnel gets no
        entry for the new guest until the old guest on this host ends.
        """
        overlays = self.tunnels.first_of_each(self.tunnels.guests())
        if overlays:
            with Netlink() as host:
                for nic, macs in overlays:
                    self.tunnels.sync(host, nic, macs)
