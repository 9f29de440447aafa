"""Expressions of nftables rules about connections, for inet chains.

The kernel's connection tracking stores the addresses, the protocol and the port of the packet that
opened a connection (`original`). Rules can read these values for packets of both directions, and
for ICMP errors about such packets.
"""

import functools
import struct
from ipaddress import IPv4Network, IPv6Network

from virtbus.netd.core.netlink import attr, be32, nest, text
from virtbus.netd.core.nft import (
    GTE,
    LTE,
    NEQ,
    REGISTER,
    TRANSPORT,
    VERDICT_REGISTER,
    AddressSet,
    compare,
    expression,
    immediate,
    load,
    masked,
    meta,
)

_CT_STATE, _CT_MARK, _CT_PROTOCOL, _CT_PROTO_DST, _CT_ZONE = 0, 3, 10, 12, 17
_CT_ADDRESSES = {
    ("source", 4): 19,
    ("destination", 4): 20,
    ("source", 6): 21,
    ("destination", 6): 22,
}
_CT_INVALID, _CT_NEW = 0x1, 0x8
_ORIGINAL = b"\0"
_META_MARK = 3
_JUMP, _GOTO = -3, -4


def _ct(key: int, *, original: bool = False) -> bytes:
    direction = [attr(3, _ORIGINAL)] if original else []
    return expression("ct", be32(1, REGISTER), be32(2, key), *direction)


def _ct_set(key: int, value: bytes) -> tuple[bytes, ...]:
    return immediate(REGISTER, value), expression("ct", be32(4, REGISTER), be32(2, key))


def _in_state(bit: int) -> tuple[bytes, ...]:
    return _ct(_CT_STATE), masked(struct.pack("=I", bit)), compare(bytes(4), NEQ)


def is_invalid() -> tuple[bytes, ...]:
    """Match packets of no known connection that cannot open one, such as TCP without SYN."""
    return _in_state(_CT_INVALID)


def is_new() -> tuple[bytes, ...]:
    """Match the packets of a connection before its first answer."""
    return _in_state(_CT_NEW)


def track_in_zone(zone: int) -> tuple[bytes, ...]:
    """Track connections separately from those of other zones.

    The rule must be in prerouting before priority -200, at which the kernel tracks packets.
    """
    return _ct_set(_CT_ZONE, struct.pack("=H", zone))


def mark_connection(mark: int) -> tuple[bytes, ...]:
    """Mark the packet's connection."""
    return _ct_set(_CT_MARK, struct.pack("=I", mark))


def add_to_connection_mark(bit: int) -> tuple[bytes, ...]:
    """Set one bit of the mark of the packet's connection."""
    return (
        _ct(_CT_MARK),
        masked(struct.pack("=I", ~bit & 0xFFFFFFFF), struct.pack("=I", bit)),
        expression("ct", be32(4, REGISTER), be32(2, _CT_MARK)),
    )


def of_connection_with(bit: int) -> tuple[bytes, ...]:
    """Match packets of connections whose mark has a bit."""
    return _ct(_CT_MARK), masked(struct.pack("=I", bit)), compare(bytes(4), NEQ)


def of_marked_connection(mark: int) -> tuple[bytes, ...]:
    """Match packets of connections with a mark."""
    return _ct(_CT_MARK), compare(struct.pack("=I", mark))


def mark_packet(mark: int) -> tuple[bytes, ...]:
    """Mark the packet, within its namespace."""
    value = immediate(REGISTER, struct.pack("=I", mark))
    return value, expression("meta", be32(2, _META_MARK), be32(3, REGISTER))


def is_marked(mark: int) -> tuple[bytes, ...]:
    """Match packets with a mark."""
    return meta(_META_MARK), compare(struct.pack("=I", mark))


def opened_with(protocol: int) -> tuple[bytes, ...]:
    """Match packets of connections of a protocol, and ICMP errors about these packets."""
    return _ct(_CT_PROTOCOL, original=True), compare(bytes((protocol,)))


def opened_to_ports(first: int, last: int) -> tuple[bytes, ...]:
    """Match packets of connections to a port within a range; match the protocol first."""
    low, high = struct.pack(">H", first), struct.pack(">H", last)
    if first == last:
        return _ct(_CT_PROTO_DST, original=True), compare(low)
    return _ct(_CT_PROTO_DST, original=True), compare(low, GTE), compare(high, LTE)


def opened_by(network: IPv4Network | IPv6Network) -> tuple[bytes, ...]:
    """Match packets of connections that an address in `network` opened."""
    return _end_in("source", network)


def opened_to(network: IPv4Network | IPv6Network) -> tuple[bytes, ...]:
    """Match packets of connections that were opened to an address in `network`."""
    return _end_in("destination", network)


def _end_in(end: str, network: IPv4Network | IPv6Network) -> tuple[bytes, ...]:
    loaded = _ct(_CT_ADDRESSES[end, network.version], original=True)
    return loaded, masked(network.netmask.packed), compare(network.network_address.packed)


def opened_by_one_of(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match packets of connections that an address in a set opened."""
    return _end_among("source", addresses)


def opened_to_one_of(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match packets of connections that were opened to an address in a set."""
    return _end_among("destination", addresses)


def _end_among(end: str, addresses: AddressSet) -> tuple[bytes, ...]:
    lookup = expression(
        "lookup", text(1, addresses.name), be32(2, REGISTER), be32(4, addresses.number)
    )
    return _ct(_CT_ADDRESSES[end, addresses.version], original=True), lookup


@functools.cache
def icmp6_types(first: int, last: int) -> tuple[bytes, ...]:
    """Match a range of types of ICMPv6; match the protocol first."""
    low, high = bytes((first,)), bytes((last,))
    return load(TRANSPORT, 0, 1), compare(low, GTE), compare(high, LTE)


def go_to(chain: str) -> bytes:
    """Continue in another chain, without a return to the present chain."""
    return _to_chain(_GOTO, chain)


def jump_to(chain: str) -> bytes:
    """Continue in another chain, and return if that chain decides nothing."""
    return _to_chain(_JUMP, chain)


def _to_chain(code: int, chain: str) -> bytes:
    verdict_ = nest(2, be32(1, code), text(2, chain))
    return expression("immediate", be32(1, VERDICT_REGISTER), nest(2, verdict_))
