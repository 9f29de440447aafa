"""The connections that published ports redirect: their mark, match and end (ADR 0051).

netd's mark is one bit of the connection's mark. The bit means that netd, and no other program of
the host, has rewritten the destination. The other bits belong to other programs, and stay.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from virtbus.netd.core import nft
from virtbus.netd.core import nft_connections as ct
from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_DUMP,
    NetlinkCall,
    Reply,
    attr,
    be32,
    find_attr,
)
from virtbus.schemas.address_pool import Address

MARK = 0x0800_0000
"""netd's bit. Kube-proxy, Tailscale and the plugins of AWS use lower bits of connections' marks."""

_LIST, _DELETE = 1 << 8 | 1, 1 << 8 | 2
_HEADER = struct.Struct(">BBH")
_MARK, _MARK_MASK = 8, 21
_NESTED = 0x8000
_OPENING, _ANSWER = 1 | _NESTED, 2 | _NESTED
_ID, _ZONE = 12, 18
_IP, _PROTOCOL = 1 | _NESTED, 2 | _NESTED
_SOURCES = 1, 3
_NUMBER, _SOURCE_PORT = 1, 2
_ENOENT = 2


@dataclass(frozen=True, slots=True)
class GuestPort:
    """A port of a guest. `protocol` is the number of TCP or UDP."""

    guest: Address
    protocol: int
    port: int


def redirect_to(guest: IPv4Address | IPv6Address, port: int) -> tuple[bytes, ...]:
    """Mark the connection and rewrite its destination. Only for chains of the type nat."""
    return (*ct.add_to_connection_mark(MARK), *nft.redirect_to(guest, port))


def is_redirected() -> tuple[bytes, ...]:
    """Match packets of connections that netd has redirected."""
    return (*nft.redirected(), *ct.of_connection_with(MARK))


def list_connections() -> NetlinkCall:
    """Return the call that lists the connections with netd's mark in the namespace."""
    body = _HEADER.pack(0, 0, 0) + be32(_MARK, MARK) + be32(_MARK_MASK, MARK)
    return NetlinkCall("list redirected connections", _LIST, NLM_F_DUMP, body, acked=False)


def ended(replies: Collection[Reply], ports: Collection[GuestPort]) -> Iterator[NetlinkCall]:
    """Yield a call that ends a connection, for each listed connection to one of `ports`."""
    for reply in replies:
        start = HEADER_BYTES + _HEADER.size
        if guest_port(reply) in ports:
            family = reply.message[HEADER_BYTES]
            parts = (
                (kind, find_attr(reply.message, start, kind)) for kind in (_OPENING, _ID, _ZONE)
            )
            body = b"".join(attr(kind, value) for kind, value in parts if value)
            yield NetlinkCall(
                "end a redirected connection",
                _DELETE,
                0,
                _HEADER.pack(family, 0, 0) + body,
                tolerated=(_ENOENT,),
            )


def guest_port(reply: Reply) -> GuestPort | None:
    """Return the guest's port to which a listed connection leads; None without a port."""
    answer = find_attr(reply.message, HEADER_BYTES + _HEADER.size, _ANSWER)
    ends, protocol = find_attr(answer, 0, _IP), find_attr(answer, 0, _PROTOCOL)
    source = next((found for kind in _SOURCES if (found := find_attr(ends, 0, kind))), b"")
    port = find_attr(protocol, 0, _SOURCE_PORT)
    if not source or not port:
        return None
    number = find_attr(protocol, 0, _NUMBER)[0]
    return GuestPort(ip_address(source), number, int.from_bytes(port, "big"))
