"""Netlink messages for the IP addresses of links, encoded and decoded by hand.

An attachment to a CNI network lists addresses and removes some. pyroute2 would take 1 ms of CPU for
these messages, which differ for each VM (ADR 0009).
"""

import errno
import struct
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv6Interface, ip_interface

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NetlinkCall,
    attr,
    find_attr,
)

Interface = IPv4Interface | IPv6Interface

_AF_UNSPEC, _AF_INET, _AF_INET6 = 0, 2, 10
_NEW, _DELETE, _GET = 20, 21, 22
"""`RTM_NEWADDR`, `RTM_DELADDR` and `RTM_GETADDR` (`linux/rtnetlink.h`)."""
_HEADER = struct.Struct("=4BI")
"""`struct ifaddrmsg` (`linux/if_addr.h`): family, prefix, flags, scope, index of the link."""
_ADDRESS, _LOCAL, _LABEL = 1, 2, 3
"""Attributes `IFA_*`."""


@dataclass(frozen=True, slots=True)
class KernelAddress:
    """An address of link `index`."""

    index: int
    interface: Interface
    is_global: bool
    label: str = field(default="", compare=False)
    """The link's name; empty for IPv6."""


def add_address(index: int, interface: Interface) -> NetlinkCall:
    """Return the call that ensures an address on link `index`."""
    return NetlinkCall(
        f"add address {interface}",
        _NEW,
        NLM_F_CREATE | NLM_F_EXCL,
        _body(index, interface),
        tolerated=(errno.EEXIST,),
    )


def delete_address(index: int, interface: Interface) -> NetlinkCall:
    """Return the call that removes an address and its routes from link `index`."""
    body = _body(index, interface)
    return NetlinkCall(
        f"delete address {interface}", _DELETE, 0, body, tolerated=(errno.EADDRNOTAVAIL,)
    )


def _body(index: int, interface: Interface) -> bytes:
    family = _AF_INET if interface.version == 4 else _AF_INET6
    packed = interface.ip.packed
    header = _HEADER.pack(family, interface.network.prefixlen, 0, 0, index)
    return header + attr(_LOCAL, packed) + attr(_ADDRESS, packed)


def list_addresses(family: int = _AF_UNSPEC) -> NetlinkCall:
    """Return the call that lists a namespace's addresses of a family, by default of all."""
    body = _HEADER.pack(family, 0, 0, 0, 0)
    return NetlinkCall("list addresses", _GET, NLM_F_DUMP, body, acked=False)


def read_address(message: bytes) -> KernelAddress | None:
    """Return the address in an answer to `list_addresses`; None if it is not an IP address."""
    family, prefix_bits, _flags, scope, index = _HEADER.unpack_from(message, HEADER_BYTES)
    if family not in {_AF_INET, _AF_INET6}:
        return None
    start = HEADER_BYTES + _HEADER.size
    packed = find_attr(message, start, _LOCAL) or find_attr(message, start, _ADDRESS)
    label = find_attr(message, start, _LABEL).rstrip(b"\0").decode("utf-8", "replace")
    return KernelAddress(
        index=index,
        interface=ip_interface((packed, prefix_bits)),
        is_global=scope == 0,
        label=label.partition(":")[0],
    )
