"""Links, addresses and routes as rtnetlink messages (`linux/if_link.h`, `linux/rtnetlink.h`)."""

import errno
import struct
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address

from virtbus.netd.core.netlink import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    Call,
    Reply,
    attr,
    attributes,
    nest,
    text,
    u8,
    u32,
)

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22

IFF_UP = 0x1
IFF_RUNNING = 0x40

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER = 1, 3, 4, 10
_IFLA_LINKINFO, _IFLA_IFALIAS, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 18, 20, 26, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_VETH_INFO_PEER = 1
_IFLA_BR_FORWARD_DELAY, _IFLA_BR_STP_STATE = 1, 5
_IFLA_BR_MCAST_SNOOPING = 23
_IFLA_INET6_ADDR_GEN_MODE = 8
_ADDR_GEN_NONE = 1
_AF_INET, _AF_INET6 = 2, 10
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_GLOBAL = 0

_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")


@dataclass(frozen=True, slots=True)
class Link:
    """A link as the kernel shows it. `master` is an index, 0 where there is none."""

    index: int
    name: str
    mac: str
    mtu: int
    flags: int
    master: int
    alias: str = ""

    @property
    def up(self) -> bool:
        return bool(self.flags & IFF_UP)

    @property
    def running(self) -> bool:
        """True while it has a carrier: of a tap, while a process holds its queue."""
        return bool(self.flags & IFF_RUNNING)


_EXISTS = (errno.EEXIST,)


def _link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return _LINK.pack(0, 0, index, flags, change)


def mac_bytes(mac: str) -> bytes:
    """The six bytes of `aa:bb:…`."""
    return bytes.fromhex(mac.replace(":", ""))


def mac_text(raw: bytes) -> str:
    """`aa:bb:…` of six bytes."""
    return raw.hex(":")


def new_bridge(name: str, *, index: int = 0, mac: str | None = None) -> Call:
    """Ensure a bridge without STP, forward delay or snooping, so that a port forwards at once.

    A given MAC stays; without one it follows the ports', which breaks neighbours' ARP caches.
    A given `index` lets the same batch name the bridge as a master.
    """
    data = nest(
        _IFLA_INFO_DATA,
        u32(_IFLA_BR_FORWARD_DELAY, 0),
        u32(_IFLA_BR_STP_STATE, 0),
        u8(_IFLA_BR_MCAST_SNOOPING, 0),
    )
    body = _link(index) + text(_IFLA_IFNAME, name)
    if mac is not None:
        body += attr(_IFLA_ADDRESS, mac_bytes(mac))
    body += nest(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, "bridge"), data)
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Call(f"add bridge {name}", RTM_NEWLINK, flags, body, tolerated=_EXISTS)


def new_veth(name: str, peer: str, peer_netns_fd: int, *, peer_mac: str) -> Call:
    """Ensure a veth pair: `name` here, `peer` in another namespace; both down."""
    other = _link() + text(_IFLA_IFNAME, peer) + u32(_IFLA_NET_NS_FD, peer_netns_fd)
    other += attr(_IFLA_ADDRESS, mac_bytes(peer_mac))
    body = _link() + text(_IFLA_IFNAME, name)
    body += nest(
        _IFLA_LINKINFO,
        text(_IFLA_INFO_KIND, "veth"),
        nest(_IFLA_INFO_DATA, attr(_VETH_INFO_PEER, other)),
    )
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Call(f"add veth {name}", RTM_NEWLINK, flags, body, tolerated=_EXISTS)


def no_ipv6(name: str) -> Call:
    """No link-local address on `name`: at 300 VMs their MLD floods make a create 5 x slower."""
    spec = nest(_IFLA_AF_SPEC, nest(_AF_INET6, u8(_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE)))
    body = _link() + text(_IFLA_IFNAME, name) + spec
    return Call(f"no ipv6 on {name}", RTM_SETLINK, 0, body, tolerated=(errno.EAFNOSUPPORT,))


def set_link(
    name: str,
    *,
    up: bool | None = None,
    master: int | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    alias: str | None = None,
) -> Call:
    """Change what is given. Attributes take effect before the flags, as the kernel does them."""
    flags, change = (IFF_UP if up else 0), (IFF_UP if up is not None else 0)
    body = _link(0, flags, change) + text(_IFLA_IFNAME, name)
    if master is not None:
        body += u32(_IFLA_MASTER, master)
    if mac is not None:
        body += attr(_IFLA_ADDRESS, mac_bytes(mac))
    if mtu is not None:
        body += u32(_IFLA_MTU, mtu)
    if alias is not None:
        body += attr(_IFLA_IFALIAS, alias.encode())
    return Call(f"set link {name}", RTM_SETLINK, 0, body)


def delete_link(name: str) -> Call:
    """Ensure that a link is gone (a veth takes its peer along)."""
    body = _link() + text(_IFLA_IFNAME, name)
    return Call(f"delete link {name}", RTM_DELLINK, 0, body, tolerated=(errno.ENODEV,))


def get_link(name: str) -> Call:
    """Ask for one link by name; never for all (2 s at 1,000 namespaces)."""
    return Call(f"get link {name}", RTM_GETLINK, 0, _link() + text(_IFLA_IFNAME, name))


def all_links() -> Call:
    """Ask for all links: only inside a VM's namespace, or once at start."""
    return Call("list links", RTM_GETLINK, NLM_F_DUMP, _link(), acked=False)


def add_address(index: int, address: IPv4Interface) -> Call:
    """Ensure that link `index` has an address."""
    flags = NLM_F_CREATE | NLM_F_EXCL
    body = _address(index, address)
    return Call(f"add address {address}", RTM_NEWADDR, flags, body, tolerated=_EXISTS)


def delete_address(index: int, address: IPv4Interface) -> Call:
    """Take an address off link `index`; its routes go with it."""
    body = _address(index, address)
    gone = (errno.EADDRNOTAVAIL,)
    return Call(f"delete address {address}", RTM_DELADDR, 0, body, tolerated=gone)


def _address(index: int, address: IPv4Interface) -> bytes:
    local = address.ip.packed
    fixed = _ADDRESS.pack(_AF_INET, address.network.prefixlen, 0, 0, index)
    return fixed + attr(_IFA_LOCAL, local) + attr(_IFA_ADDRESS, local)


def all_addresses() -> Call:
    """Ask for all IPv4 addresses of the namespace."""
    return Call(
        "list addresses", RTM_GETADDR, NLM_F_DUMP, _ADDRESS.pack(_AF_INET, 0, 0, 0, 0), acked=False
    )


def read_link(reply: Reply) -> Link | None:
    """The link in an RTM_NEWLINK message, None for other messages."""
    if reply.type != RTM_NEWLINK or len(reply.body) < _LINK.size:
        return None
    _family, _type, index, flags, _change = _LINK.unpack_from(reply.body)
    found = attributes(reply.body, _LINK.size)
    return Link(
        index=index,
        name=found.get(_IFLA_IFNAME, b"").rstrip(b"\0").decode("ascii", "replace"),
        mac=mac_text(found.get(_IFLA_ADDRESS, b"")),
        mtu=int.from_bytes(found.get(_IFLA_MTU, b"\0"), sys.byteorder),
        flags=flags,
        master=int.from_bytes(found.get(_IFLA_MASTER, b"\0"), sys.byteorder),
        alias=found.get(_IFLA_IFALIAS, b"").rstrip(b"\0").decode("utf-8", "replace"),
    )


def host_addresses() -> Call:
    """Ask for all addresses of the namespace, IPv4 and IPv6."""
    return Call(
        "list addresses", RTM_GETADDR, NLM_F_DUMP, _ADDRESS.pack(0, 0, 0, 0, 0), acked=False
    )


def read_host_address(reply: Reply) -> tuple[int, IPv4Address | IPv6Address] | None:
    """Link index and address of global scope in an RTM_NEWADDR message; None for all else."""
    if reply.type != RTM_NEWADDR or len(reply.body) < _ADDRESS.size:
        return None
    _family, _prefix, _flags, scope, index = _ADDRESS.unpack_from(reply.body)
    found = attributes(reply.body, _ADDRESS.size)
    address = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS, b"")
    if scope != _SCOPE_GLOBAL or len(address) not in {4, 16}:
        return None
    return index, IPv4Address(address) if len(address) == 4 else IPv6Address(address)


def read_address(reply: Reply) -> tuple[int, IPv4Interface] | None:
    """Link index and address in an RTM_NEWADDR message, None for other messages."""
    if reply.type != RTM_NEWADDR or len(reply.body) < _ADDRESS.size:
        return None
    _family, prefix, _flags, _scope, index = _ADDRESS.unpack_from(reply.body)
    local = attributes(reply.body, _ADDRESS.size).get(_IFA_LOCAL, b"")
    if len(local) != 4:
        return None
    return index, IPv4Interface((IPv4Address(local), prefix))
