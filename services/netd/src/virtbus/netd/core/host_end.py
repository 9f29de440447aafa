"""Netlink messages that attach a VM, encoded and decoded by hand.

These messages differ for each VM. pyroute2 would take 0.4 ms for them, and an attachment of 4 ms
would exceed its budget (ADR 0009).
"""

import errno
import struct

from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NetlinkCall,
    attr,
    find_attr,
    nest,
    text,
)

_LINK = bytes(16)
"""A `struct ifinfomsg` without any values."""
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_MASTER, IFLA_IFALIAS = 1, 3, 4, 10, 20
IFLA_STATS64, IFLA_LINKINFO = 23, 18
_SLAVE_DATA, _PORT_ISOLATED = 5, 33
"""Numbers of attributes (`linux/if_link.h`)."""


def get_link(name: str) -> NetlinkCall:
    """Return the query for one link by name."""
    return NetlinkCall(f"get {name}", 18, 0, _LINK + text(IFLA_IFNAME, name))


def read_attribute(message: bytes, kind: int) -> bytes:
    """Return an attribute of a link in an answer to `get_link`; empty if it is missing.

    pyroute2 decodes every attribute of a link, which takes 0.15 ms on a quiet machine.
    """
    return find_attr(message, HEADER_BYTES + len(_LINK), kind)


def is_isolated(message: bytes) -> bool:
    """Return True if the link is an isolated bridge port, cut off from other isolated ports."""
    info = read_attribute(message, IFLA_LINKINFO)
    return find_attr(find_attr(info, 0, _SLAVE_DATA), 0, _PORT_ISOLATED) == b"\1"


def new_veth(
    name: str, peer: str, peer_netns_fd: int, *, peer_mac: str, mac: str = "", mtu: int = 0
) -> NetlinkCall:
    """Return the call that ensures a veth pair, both ends down.

    The end `name` is in the socket's own namespace, and the end `peer` in another. Without `mac`
    and `mtu`, the kernel chooses them.
    """
    size = attr(IFLA_MTU, struct.pack("=I", mtu)) if mtu else b""
    other = _LINK + text(IFLA_IFNAME, peer) + attr(IFLA_ADDRESS, mac_bytes(peer_mac)) + size
    other += attr(28, struct.pack("=I", peer_netns_fd))
    own = (attr(IFLA_ADDRESS, mac_bytes(mac)) if mac else b"") + size
    body = (
        _LINK + text(IFLA_IFNAME, name) + own + nest(18, text(1, "veth"), nest(2, attr(1, other)))
    )
    flags = NLM_F_CREATE | NLM_F_EXCL
    return NetlinkCall(f"add veth {name}", 16, flags, body, tolerated=(errno.EEXIST,))


def no_ipv6(name: str) -> NetlinkCall:
    """Return the call that keeps link-local addresses off `name`.

    At 300 VMs, the MLD messages of these addresses make a create 5 times slower.
    """
    body = _LINK + text(IFLA_IFNAME, name) + nest(26, nest(10, attr(8, b"\1")))
    return NetlinkCall(f"no ipv6 on {name}", 19, 0, body, tolerated=(errno.EAFNOSUPPORT,))


def plug(name: str, master: int, *, alias: str = "", mac: str = "") -> NetlinkCall:
    """Return the call that sets `name` up and plugs it into the bridge with index `master`.

    Without `alias` or `mac`, the link keeps its own.
    """
    body = struct.pack("=8xII", 1, 1) + text(IFLA_IFNAME, name)
    body += attr(IFLA_MASTER, struct.pack("=I", master))
    body += attr(IFLA_ADDRESS, mac_bytes(mac)) if mac else b""
    body += attr(IFLA_IFALIAS, alias.encode()) if alias else b""
    return NetlinkCall(f"plug {name}", 19, 0, body)
