"""Attacher for an existing bridge of the host: networks of the kind `bridge`.

The bridge belongs to the host. The ports of VMs on it are ends of veth pairs, which the kernel
removes with the VM's namespace. If the network has no subnet, the DHCP server of the bridge's
segment gives the guests their addresses.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from virtbus.netd.core import host_end, names
from virtbus.netd.core.address_assignment import on_segment
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.bridge_ports import bridge_full, refuse_full
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.paths import OF_HOST_DOWN
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge import links
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_ends import wrong_end
from virtbus.netd.edge.netlink import Netlink, NetlinkError
from virtbus.netd.edge.segments import SegmentLink, Segments
from virtbus.schemas.errors import VirtbusError


@dataclass(frozen=True, slots=True)
class HostBridgeAttacher:
    """Implements `attacher.Attacher`."""

    segments: Segments
    built_in: HostBridge

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        """Return the interface with its addresses, after checks of the bridge: VLANs, ports, MTU.

        Raises VirtbusError.
        """
        with Netlink() as host:
            link = self.segments.of(host, nic)
        refuse_full(nic, len(used.on_host_link(link.name)))
        hosts = self.built_in.reach.hosts
        return on_segment(nic, vm.uid, link.mtu, used.addresses(nic), hosts)

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """Do nothing: the bridge belongs to the host."""

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        for nic in nics:
            link = self.segments.of(host, nic)
            wire, outer = names.wire_mac(uid, nic.index), names.outer_mac(uid, nic.index)
            host.do(
                [
                    host_end.new_veth(
                        nic.host_link, nic.eth, netns_fd, peer_mac=wire, mac=outer, mtu=link.mtu
                    ),
                    host_end.no_ipv6(nic.host_link),
                ]
            )
            _plug(host, uid, nic, link)

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        """Return messages about faulty or unplugged host ends, and about bridges that are down.

        With `mend`, plug such host ends into the bridge instead, if both exist. Then return
        nothing.
        """
        found = []
        with Netlink() as host:
            for nic in nics:
                try:
                    link = self.segments.of(host, nic)
                except VirtbusError as error:
                    found.append(f"{nic.host_link}: {error}")
                    continue
                found += is_down(host, nic, link)
                wrong = wrong_end(host, nic.host_link, link.index, link.name)
                end = links.find(host, nic.host_link)
                if mend and wrong and end is not None:
                    _plug(host, end.alias, nic, link)
                    if end.isolated:
                        host.do([links.open_port(nic.host_link)])
                elif wrong:
                    found.append(f"{nic.host_link}: {wrong}")
        return [] if mend else found

    def detach(self, left: Sequence[Nic]) -> None:
        """Do nothing: the bridge stays, and its ports end with their namespaces."""


def _plug(host: Netlink, uid: str, nic: Nic, link: SegmentLink) -> None:
    """Make the host end a port of the bridge, and then put the port into its VLAN.

    Between the two steps, the port is in the bridge's default VLAN. At an attach, no frame passes
    then, because the tap is still down. At a repair, the running guest is in the default VLAN.
    """
    try:
        host.do([host_end.plug(nic.host_link, link.index, alias=uid)])
    except NetlinkError as error:
        if error.errno == errno.EXFULL:
            raise bridge_full(nic) from error
        raise
    vlan = nic.target.spec.vlan if nic.target is not None else None
    port = links.find(host, nic.host_link) if vlan else None
    if vlan and port is not None:
        host.do(vlan_calls(port.index, vlan, link.pvid or 0))


def is_down(host: Netlink, nic: Nic, link: SegmentLink) -> list[str]:
    """Return a message if the host's link of a segment is down. virtbus never changes the link."""
    found = links.find(host, link.name)
    return [] if found is None or found.up else [f"{nic.eth}: {link.name} {OF_HOST_DOWN}"]


def vlan_calls(port: int, vlan: int, pvid: int) -> list[NetlinkCall]:
    """Return the calls that make a new port an untagged member of `vlan` instead of `pvid`.

    `pvid` is the VLAN that the bridge gives each new port; 0 if it gives none.
    """
    calls = [links.add_port_vlan(port, vlan)]
    return calls if pvid in {0, vlan} else [*calls, links.delete_port_vlan(port, pvid)]
