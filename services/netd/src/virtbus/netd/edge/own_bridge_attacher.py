"""Connects interfaces by a veth pair to a bridge of virtbus.

Handles the built-in network, and networks of kind nat, routed, isolated and overlay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from virtbus.netd.core.address_assignment import addressed
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.bridge_ports import refuse_full
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.host_ends import plug, replug, unplugged
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.network_object import BRIDGE_MTU


@dataclass(frozen=True, slots=True)
class OwnBridgeAttacher:
    """Implements `attacher.Attacher`."""

    bridges: HostBridges

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics, most: int = BRIDGE_MTU) -> Nic:
        """Return the interface with its addresses. `most` is the largest permitted MTU.

        Raises VirtbusError.
        """
        bridge = self.bridges.of(nic)
        refuse_full(nic, used.ports(nic))
        nic, taken = used.remembered(nic, vm.uid), used.addresses(nic)
        return addressed(nic, vm.uid, bridge.gateways.all, taken, most, used.freed(nic))

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """Raises VirtbusError."""
        for bridge in self._of(nics):
            bridge.ensure(host)

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        plug(host, uid, [(nic, self.bridges.of(nic).index) for nic in nics], netns_fd)

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        """Return a message for each unplugged host end. With `mend`, plug the host ends instead."""
        found: list[str] = []
        with Netlink() as host:
            for bridge in self._of(nics):
                own = [nic for nic in nics if self.bridges.of(nic) is bridge]
                if mend:
                    replug(host, bridge, own)
                else:
                    found += unplugged(host, bridge, own)
        return found

    def detach(self, left: Sequence[Nic]) -> None:
        for bridge in self.bridges.surplus(left):
            self.bridges.remove(bridge)

    def _of(self, nics: Sequence[Nic]) -> list[HostBridge]:
        return list(dict.fromkeys(self.bridges.of(nic) for nic in nics))
