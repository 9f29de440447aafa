"""Builds the netlink calls for links, and reads links and addresses from the kernel's answers."""

import errno
import functools
import struct
import sys
from dataclasses import dataclass, replace
from socket import AF_UNSPEC

from virtbus.netd.core import host_end, link_addresses
from virtbus.netd.core.link_addresses import KernelAddress
from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NetlinkCall,
    Reply,
    attr,
    find_attr,
)
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.rtnl import (
    LINKS,
    Attribute,
    nest,
)
from virtbus.schemas.overlay import TUNNEL_PORT

_AF_BRIDGE = 7
_VLAN_PVID, _VLAN_UNTAGGED = 0x2, 0x4
"""`BRIDGE_VLAN_INFO_*`: incoming untagged frames join the VLAN; frames of the VLAN leave untagged.
"""
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_INDEX_FLAGS, _INDEX_OFFSET = struct.Struct("=iI"), HEADER_BYTES + 4

_kept = functools.lru_cache(maxsize=128)
"""Caches encoded calls, which many namespaces share. pyroute2 takes 50 to 130 us to encode a call.
"""
_GETNSID, _NSID, _NSID_OF_FD = 90, 1, 3
"""`RTM_GETNSID` and its attributes (`linux/net_namespace.h`)."""
_INFO_KIND, _INFO_DATA, _LINK_NETNSID = 1, 2, 37
_BR_VLAN_FILTERING, _BR_VLAN_DEFAULT_PVID = 7, 39
"""Numbers of attributes (`linux/if_link.h`)."""
_U32, _NO_NSID = struct.Struct("=I"), struct.pack("=i", -1)
_STATS64 = struct.Struct("=8Q")
_COUNTED = (
    *("rx_packets", "tx_packets", "rx_bytes", "tx_bytes"),
    *("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
)
"""The first counters of `rtnl_link_stats64`."""


class KernelLink:
    """A link as the kernel reports it. A property decodes its attribute at each read."""

    def __init__(self, reply: Reply) -> None:
        self._message = reply.message
        self.index: int
        self.index, flags = _INDEX_FLAGS.unpack_from(reply.message, _INDEX_OFFSET)
        self.up = bool(flags & _IFF_UP)
        self.running = bool(flags & _IFF_RUNNING)
        """True if the link has a carrier. A tap has a carrier while a process has its queue open.
        """

    @property
    def name(self) -> str:
        return self._text(host_end.IFLA_IFNAME)

    @property
    def alias(self) -> str:
        return self._text(host_end.IFLA_IFALIAS)

    @property
    def mac(self) -> str:
        return host_end.read_attribute(self._message, host_end.IFLA_ADDRESS).hex(":")

    @property
    def mtu(self) -> int:
        return self._number(host_end.IFLA_MTU)

    @property
    def isolated(self) -> bool:
        """True for a bridge port that exchanges no frames with other isolated ports."""
        return host_end.is_isolated(self._message)

    @property
    def counted(self) -> dict[str, int]:
        raw = host_end.read_attribute(self._message, host_end.IFLA_STATS64)
        return dict(zip(_COUNTED, _STATS64.unpack_from(raw), strict=True)) if raw else {}

    @property
    def master(self) -> int:
        """The link index of the bridge that has this link as a port; 0 for none."""
        return self._number(host_end.IFLA_MASTER)

    def _text(self, kind: int) -> str:
        value = host_end.read_attribute(self._message, kind)
        return value.rstrip(b"\0").decode("utf-8", "replace")

    def _number(self, kind: int) -> int:
        return int.from_bytes(host_end.read_attribute(self._message, kind), sys.byteorder)


@dataclass(frozen=True, slots=True)
class LinkDetails:
    """A link with its kind, such as `bridge`. A hardware device has an empty kind."""

    index: int
    kind: str
    mac: str
    mtu: int
    master: int
    alias: str
    filters_vlans: bool
    pvid: int | None
    """The VLAN that a bridge gives new ports. None for other links, or if the kernel's bridges have
    no VLANs.
    """
    peer_namespace: int | None
    """The id of the namespace with the link's peer, or with the link below this link.

    None if the peer or lower link is in this namespace, or does not exist.
    """


@_kept
def new_bridge(name: str, *, index: int = 0, mac: str | None = None) -> NetlinkCall:
    """Return the call that ensures a bridge whose ports forward at once.

    The bridge has no STP, no forward delay and no multicast snooping. Without `mac`, its MAC
    changes with its ports, and neighbours' ARP entries become stale. With `index`, later calls of
    the same batch can name the bridge as a master.
    """
    data = nest(
        ("IFLA_BR_FORWARD_DELAY", 0), ("IFLA_BR_STP_STATE", 0), ("IFLA_BR_MCAST_SNOOPING", 0)
    )
    address = [] if mac is None else [("IFLA_ADDRESS", mac)]
    return LINKS.ensure(
        f"bridge {name}",
        ("IFLA_IFNAME", name),
        *address,
        ("IFLA_LINKINFO", nest(("IFLA_INFO_KIND", "bridge"), ("IFLA_INFO_DATA", data))),
        index=index,
    )


@_kept
def set_link(
    name: str,
    *,
    up: bool | None = None,
    master: int | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    alias: str | None = None,
) -> NetlinkCall:
    """Return the call that changes the values that are not None.

    The kernel applies attributes before flags, so the link goes up or down after the other changes.
    """
    given: list[Attribute] = [
        ("IFLA_MASTER", master),
        ("IFLA_ADDRESS", mac),
        ("IFLA_MTU", mtu),
        ("IFLA_IFALIAS", alias),
    ]
    flags, change = _IFF_UP if up else 0, 0 if up is None else _IFF_UP
    changes = [each for each in given if each[1] is not None]
    return LINKS.set(name, ("IFLA_IFNAME", name), *changes, flags=flags, change=change)


def raise_mtu(name: str, mtu: int) -> NetlinkCall:
    """Return the call that sets an MTU. No effect if the link below has a smaller MTU.

    The call tolerates the kernel's errors for this case: EINVAL for macvlan, ERANGE for a VLAN.
    """
    call = set_link(name, mtu=mtu)
    return replace(call, tolerated=(errno.EINVAL, errno.ERANGE))


def new_macvlan(
    name: str, lower: int, mode: str, netns_fd: int, *, mac: str | None, mtu: int
) -> NetlinkCall:
    """Return the call that ensures a macvlan link in the namespace `netns_fd`.

    `lower` is the index of a link in the socket's namespace.
    """
    address = [] if mac is None else [("IFLA_ADDRESS", mac)]
    data = nest(("IFLA_MACVLAN_MODE", mode))
    return LINKS.ensure(
        f"macvlan {name}",
        ("IFLA_LINK", lower),
        ("IFLA_IFNAME", name),
        *address,
        ("IFLA_MTU", mtu),
        ("IFLA_NET_NS_FD", netns_fd),
        ("IFLA_LINKINFO", nest(("IFLA_INFO_KIND", "macvlan"), ("IFLA_INFO_DATA", data))),
    )


def move_link(name: str, index: int, new_name: str, netns_fd: int) -> NetlinkCall:
    """Return the call that moves a link to another namespace, with a new name.

    The link must be down. A process keeps its open tap.
    """
    target = ("IFLA_NET_NS_FD", netns_fd)
    return LINKS.set(f"{name} netns", ("IFLA_IFNAME", new_name), target, index=index)


def new_vxlan(name: str, vni: int, local: str, mtu: int) -> NetlinkCall:
    """Return the call that ensures a VXLAN device without learning, flooding and multicast.

    The device answers ARP from its own neighbour table. If another device has the VNI, the kernel
    makes no device and answers EEXIST. The call tolerates EEXIST, because an existing link of this
    name causes the same error.
    """
    data = nest(
        ("IFLA_VXLAN_ID", vni),
        ("IFLA_VXLAN_LOCAL", local),
        ("IFLA_VXLAN_PORT", TUNNEL_PORT),
        ("IFLA_VXLAN_LEARNING", 0),
        ("IFLA_VXLAN_PROXY", 1),
    )
    info = nest(("IFLA_INFO_KIND", "vxlan"), ("IFLA_INFO_DATA", data))
    return LINKS.ensure(
        f"vxlan {name}", ("IFLA_IFNAME", name), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", info)
    )


@_kept
def quiet_port(name: str) -> NetlinkCall:
    """Return the call that ends learning and unknown-unicast flooding at a bridge's port."""
    return _port(name, ("IFLA_BRPORT_LEARNING", 0), ("IFLA_BRPORT_UNICAST_FLOOD", 0))


@_kept
def deaf_port(name: str) -> NetlinkCall:
    """Return the call that ends learning from a bridge's port."""
    return _port(name, ("IFLA_BRPORT_LEARNING", 0))


def open_port(name: str) -> NetlinkCall:
    """Return the call that ends the isolation of a bridge's port."""
    return _port(name, ("IFLA_BRPORT_ISOLATED", 0))


def _port(name: str, *data: Attribute) -> NetlinkCall:
    info = nest(("IFLA_INFO_SLAVE_KIND", "bridge"), ("IFLA_INFO_SLAVE_DATA", nest(*data)))
    return LINKS.set_port(name, ("IFLA_IFNAME", name), ("IFLA_LINKINFO", info))


def delete_link(name: str) -> NetlinkCall:
    """Return the call that deletes a link if it exists. A veth's peer ends with the veth."""
    return LINKS.delete(name, ("IFLA_IFNAME", name), gone=errno.ENODEV)


def find(netlink: Netlink, name: str) -> KernelLink | None:
    """Return a link by name; None if missing. A list would take 2 s at 1,000 namespaces."""
    reply = netlink.ask(host_end.get_link(name))
    return KernelLink(reply) if reply is not None else None


def describe(netlink: Netlink, name: str) -> LinkDetails | None:
    """Return a link with its kind by name; None if missing."""
    reply = netlink.ask(host_end.get_link(name))
    if reply is None:
        return None
    link = KernelLink(reply)
    info = host_end.read_attribute(reply.message, host_end.IFLA_LINKINFO)
    kind = find_attr(info, 0, _INFO_KIND).rstrip(b"\0").decode("utf-8", "replace")
    data = find_attr(info, 0, _INFO_DATA) if kind == "bridge" else b""
    pvid = find_attr(data, 0, _BR_VLAN_DEFAULT_PVID)
    peer = host_end.read_attribute(reply.message, _LINK_NETNSID)
    return LinkDetails(
        index=link.index,
        kind=kind,
        mac=link.mac,
        mtu=link.mtu,
        master=link.master,
        alias=link.alias,
        filters_vlans=any(find_attr(data, 0, _BR_VLAN_FILTERING)),
        pvid=int.from_bytes(pvid, sys.byteorder) if pvid else None,
        peer_namespace=int.from_bytes(peer, sys.byteorder, signed=True) if peer else None,
    )


def namespace_id(netlink: Netlink, fd: int) -> int | None:
    """Return the nsid of the namespace `fd` in the socket's namespace; None if unassigned."""
    ask = NetlinkCall("namespace id", _GETNSID, 0, bytes(4) + attr(_NSID_OF_FD, _U32.pack(fd)))
    answer = netlink.ask(ask)
    raw = find_attr(answer.message, HEADER_BYTES + 4, _NSID) if answer is not None else b""
    return None if raw in {b"", _NO_NSID} else int.from_bytes(raw, sys.byteorder)


def add_port_vlan(port: int, vlan: int) -> NetlinkCall:
    """Return the call that makes a bridge's port an untagged member of a VLAN."""
    return LINKS.set(
        f"vlan {vlan} of port {port}",
        ("IFLA_AF_SPEC", _port_vlan(vlan, _VLAN_PVID | _VLAN_UNTAGGED)),
        family=_AF_BRIDGE,
        index=port,
    )


def delete_port_vlan(port: int, vlan: int) -> NetlinkCall:
    """Return the call that ends a bridge port's membership of a VLAN."""
    spec = ("IFLA_AF_SPEC", _port_vlan(vlan, 0))
    what = f"vlan {vlan} of port {port}"
    return LINKS.delete(what, spec, gone=errno.ENOENT, family=_AF_BRIDGE, index=port)


def _port_vlan(vlan: int, flags: int) -> dict[str, object]:
    return nest(("IFLA_BRIDGE_VLAN_INFO", {"flags": flags, "vid": vlan}))


def list_links(netlink: Netlink) -> list[KernelLink]:
    """Return all links of the namespace. The list takes 2 s at 1,000 namespaces."""
    return [KernelLink(reply) for reply in netlink.dump(LINKS.list_all("links"))]


def list_addresses(
    netlink: Netlink, family: int = AF_UNSPEC, *, index: int | None = None
) -> list[KernelAddress]:
    """Return the namespace's addresses of a family, by default IPv4 and IPv6.

    With `index`, return only the addresses of this link.
    """
    replies = netlink.dump(link_addresses.list_addresses(family))
    found = [link_addresses.read_address(reply.message) for reply in replies]
    return [each for each in found if each is not None and index in {None, each.index}]
