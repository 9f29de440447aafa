"""Connects the host ends of veth pairs with a bridge, and checks the host ends."""

from collections.abc import Sequence

from virtbus.netd.core import host_end, names
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.edge import links
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.network_object import BRIDGE_MTU


def plug(host: Netlink, uid: str, nics: Sequence[tuple[Nic, int]], netns_fd: int) -> None:
    """Make a veth pair for each interface, and plug its host end into a bridge.

    `nics` pairs each interface with its bridge's link index. `netns_fd` is the VM's namespace.
    """
    calls: list[NetlinkCall] = []
    for nic, master in nics:
        wire = names.wire_mac(uid, nic.index)
        mtu = bridged_mtu(nic)
        calls.append(host_end.new_veth(nic.host_link, nic.eth, netns_fd, peer_mac=wire, mtu=mtu))
        calls.append(host_end.no_ipv6(nic.host_link))
        calls.append(host_end.plug(nic.host_link, master, alias=uid))
    host.do(calls)


def bridged_mtu(nic: Nic) -> int:
    """Return the MTU of an interface's veth pair to a bridge of virtbus.

    The result is the network's MTU, at least BRIDGE_MTU. A smaller MTU of one interface is set on
    its tap only, because a Linux bridge takes the smallest MTU of its ports.
    """
    own = nic.target.spec.mtu if nic.target is not None else None
    return max(BRIDGE_MTU, own or 0)


def unplugged(host: Netlink, bridge: HostBridge, nics: Sequence[Nic]) -> list[str]:
    """Return a message for each host end of `nics` that is gone, down, isolated or unplugged."""
    master = links.find(host, bridge.name)
    index = master.index if master is not None else 0
    wrong = {nic.host_link: wrong_end(host, nic.host_link, index, bridge.name) for nic in nics}
    return [f"{name}: {what}" for name, what in wrong.items() if what]


def wrong_end(host: Netlink, name: str, index: int, bridge: str) -> str:
    """Return a host end's fault in words, or an empty string.

    `index` is its bridge's link index.
    """
    link = links.find(host, name)
    if link is None:
        return "gone"
    if link.master != index:
        return f"not on {bridge}"
    if link.isolated:
        return "an isolated port"
    return "" if link.up else "down"


def replug(host: Netlink, bridge: HostBridge, nics: Sequence[Nic]) -> None:
    """Ensure the bridge and its rules, and make the host ends of `nics` its ports."""
    index = bridge.ensure(host)
    bridge.mend()
    for nic in nics:
        link = links.find(host, nic.host_link)
        if link is None:
            continue
        if link.master != index or not link.up:
            host.do([links.set_link(nic.host_link, up=True, master=index)])
        if link.isolated:
            host.do([links.open_port(nic.host_link)])
