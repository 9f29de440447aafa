"""nftables chains and rules, for messages of `nft_tables` (`linux/netfilter/nf_tables.h`).

A rule is a list of expressions: loads into register 1, compares, and a verdict. libnftables takes
as long as this module (0.4 ms of CPU). But libnftables is not thread-safe, and ends the process if
its socket cannot be opened. `nft -f -` costs 7 times as much.
"""

import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from virtbus.netd.core.netlink import attr, be32, be64, nest, text

REGISTER = 1
VERDICT_REGISTER = 0
_SECOND_REGISTER = 2
_FIB_ADDRESS_TYPE, _FIB_TO, _LOCAL_ADDRESS = 3, 2, 2
_TO_DESTINATION, _NF_IPV4, _NF_IPV6 = 1, 2, 10
EQ, NEQ, LTE, GTE = 0, 1, 3, 5
"""Operators of `compare`."""
_LOOKUP_INVERTED = 1
"""`NFT_LOOKUP_F_INV`."""
_LINK_LAYER, _NETWORK, TRANSPORT = 0, 1, 2
_META_IIFNAME, _META_OIFNAME, _META_L4PROTO, _META_NFPROTO = 6, 7, 16, 15
_LIMIT_PACKETS, _LIMIT_EXCEEDED = 0, 1
_CT_STATE, _CT_STATUS = 0, 2
_CT_ESTABLISHED_OR_RELATED = 0x2 | 0x4
_CT_DESTINATION_REWRITTEN = 0x20
"""`IPS_DST_NAT`."""

ETHERTYPE_IP, ETHERTYPE_ARP, ETHERTYPE_IPV6 = 0x0800, 0x0806, 0x86DD
ICMP, TCP, UDP, ICMP6 = 1, 6, 17, 58


class Family(IntEnum):
    """The nftables families in use."""

    INET = 1
    NETDEV = 5


class NftVerdict(IntEnum):
    """The verdict on a packet."""

    DROP = 0
    ACCEPT = 1


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain. Without a `hook`, only other chains lead to it.

    `hook` and `priority` are the kernel's numbers. Only netdev chains have a `device`.
    """

    name: str
    hook: int | None = None
    priority: int = 0
    kind: str = "filter"
    policy: NftVerdict = NftVerdict.ACCEPT
    device: str = ""


@dataclass(frozen=True, slots=True)
class AddressSet:
    """A named set of addresses of one version. `number` identifies the set in its transaction."""

    name: str
    number: int
    addresses: tuple[IPv4Address | IPv6Address, ...]
    version: int = 4


@dataclass(frozen=True, slots=True)
class NftRule:
    """The expressions of one rule, in order."""

    chain: str
    expressions: tuple[bytes, ...]


def expression(name: str, *parts: bytes) -> bytes:
    """Return an expression of a rule with its attributes."""
    return nest(1, text(1, name), nest(2, *parts))


def compare(value: bytes, op: int = EQ) -> bytes:
    """Compare register 1 with a value."""
    return expression("cmp", be32(1, REGISTER), be32(2, op), nest(3, attr(1, value)))


@functools.cache
def load(base: int, offset: int, length: int) -> bytes:
    """Load bytes of the packet into register 1. `base` is the layer whose header has the bytes."""
    return expression("payload", be32(1, REGISTER), be32(2, base), be32(3, offset), be32(4, length))


def meta(key: int) -> bytes:
    """Load a property of the packet into register 1."""
    return expression("meta", be32(1, REGISTER), be32(2, key))


@functools.cache
def ether_type(kind: int) -> tuple[bytes, ...]:
    """Match the EtherType of the frame. A VLAN tag is 0x8100 here, unlike in `meta protocol`."""
    return load(_LINK_LAYER, 12, 2), compare(struct.pack(">H", kind))


def ether_source_is_not(mac: bytes) -> tuple[bytes, ...]:
    """Match frames with any other source MAC."""
    return load(_LINK_LAYER, 6, 6), compare(mac, NEQ)


def ether_source_and_type(mac: bytes, kind: int) -> tuple[bytes, ...]:
    """Match the source MAC and the EtherType of the frame with one comparison."""
    return load(_LINK_LAYER, 6, 8), compare(mac + struct.pack(">H", kind))


def arp_sender(mac: bytes, address: IPv4Address) -> tuple[bytes, ...]:
    """Match Ethernet/IPv4 ARP whose sender is (mac, address)."""
    return load(_NETWORK, 8, 10), compare(mac + address.packed)


def ip_source(address: IPv4Address) -> tuple[bytes, ...]:
    """Match the IPv4 source address."""
    return load(_NETWORK, 12, 4), compare(address.packed)


def ip_source_is_not(address: IPv4Address) -> tuple[bytes, ...]:
    """Match any other IPv4 source address."""
    return load(_NETWORK, 12, 4), compare(address.packed, NEQ)


def ip_source_in(network: IPv4Network) -> tuple[bytes, ...]:
    """Match an IPv4 source inside `network`."""
    return _address_in(12, network)


def ip_destination_in(network: IPv4Network) -> tuple[bytes, ...]:
    """Match an IPv4 destination inside `network`."""
    return _address_in(16, network)


def ip_destination_among(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match an IPv4 destination in a set of the same table."""
    return load(_NETWORK, 16, 4), _among(addresses)


def ip_source_among(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match an IPv4 source in a set of the same table."""
    return load(_NETWORK, 12, 4), _among(addresses)


def ip_source_not_among(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match an IPv4 source outside of a set of the same table."""
    return load(_NETWORK, 12, 4), _among(addresses, be32(5, _LOOKUP_INVERTED))


def _among(addresses: AddressSet, *more: bytes) -> bytes:
    return expression(
        "lookup", text(1, addresses.name), be32(2, REGISTER), be32(4, addresses.number), *more
    )


def _address_in(offset: int, network: IPv4Network | IPv6Network, op: int = EQ) -> tuple[bytes, ...]:
    mask = network.netmask.packed
    loaded = load(_NETWORK, offset, len(mask))
    return loaded, masked(mask), compare(network.network_address.packed, op)


def masked(mask: bytes, flipped: bytes = b"") -> bytes:
    """Clear the bits of register 1 that are not in `mask`, then flip the bits in `flipped`."""
    return expression(
        "bitwise",
        be32(1, REGISTER),
        be32(2, REGISTER),
        be32(3, len(mask)),
        nest(4, attr(1, mask)),
        nest(5, attr(1, flipped or bytes(len(mask)))),
    )


# --- IPv6 -------------------------------------------------------------------------------------
def is_ipv6() -> tuple[bytes, ...]:
    """Match IPv6 in an inet chain."""
    return meta(_META_NFPROTO), compare(bytes((10,)))


@functools.cache
def ip6_protocol(number: int) -> tuple[bytes, ...]:
    """Match the protocol directly behind the header of IPv6, for netdev chains."""
    return load(_NETWORK, 6, 1), compare(bytes((number,)))


def ip6_source(address: IPv6Address) -> tuple[bytes, ...]:
    """Match the IPv6 source address."""
    return load(_NETWORK, 8, 16), compare(address.packed)


def ip6_destination(address: IPv6Address) -> tuple[bytes, ...]:
    """Match the IPv6 destination address."""
    return load(_NETWORK, 24, 16), compare(address.packed)


def ip6_source_in(network: IPv6Network) -> tuple[bytes, ...]:
    """Match an IPv6 source inside `network`."""
    return _address_in(8, network)


def ip6_destination_in(network: IPv6Network) -> tuple[bytes, ...]:
    """Match an IPv6 destination inside `network`."""
    return _address_in(24, network)


def ip6_destination_outside(network: IPv6Network) -> tuple[bytes, ...]:
    """Match an IPv6 destination that is not inside `network`."""
    return _address_in(24, network, NEQ)


def ip6_destination_among(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match an IPv6 destination in a set of the same table."""
    return load(_NETWORK, 24, 16), _among(addresses)


def ip6_source_among(addresses: AddressSet) -> tuple[bytes, ...]:
    """Match an IPv6 source in a set of the same table."""
    return load(_NETWORK, 8, 16), _among(addresses)


@functools.cache
def icmp6_type(kind: int) -> tuple[bytes, ...]:
    """Match the type of an ICMPv6 message; match the protocol first."""
    return load(TRANSPORT, 0, 1), compare(bytes((kind,)))


def nd_target(address: IPv6Address) -> tuple[bytes, ...]:
    """Match the target of a neighbour solicitation or advertisement; match its type first."""
    return load(TRANSPORT, 8, 16), compare(address.packed)


def ip_destination(address: IPv4Address) -> tuple[bytes, ...]:
    """Match the IPv4 destination address."""
    return load(_NETWORK, 16, 4), compare(address.packed)


@functools.cache
def ip_protocol(number: int) -> tuple[bytes, ...]:
    """Match the protocol byte of an IPv4 header, for netdev chains."""
    return load(_NETWORK, 9, 1), compare(bytes((number,)))


def is_echo_request() -> tuple[bytes, ...]:
    """Match an ICMP echo request; match the protocol first."""
    return load(TRANSPORT, 0, 1), compare(b"\x08")


def is_ipv4() -> tuple[bytes, ...]:
    """Match IPv4 in an inet chain."""
    return meta(_META_NFPROTO), compare(bytes((2,)))


def l4_protocol(number: int) -> tuple[bytes, ...]:
    """Match the transport protocol, for inet chains."""
    return meta(_META_L4PROTO), compare(bytes((number,)))


@functools.cache
def source_port(port: int) -> tuple[bytes, ...]:
    """Match a TCP or UDP source port; match the protocol first."""
    return load(TRANSPORT, 0, 2), compare(struct.pack(">H", port))


@functools.cache
def destination_port(port: int, op: int = EQ) -> tuple[bytes, ...]:
    """Match a TCP or UDP destination port; match the protocol first."""
    return load(TRANSPORT, 2, 2), compare(struct.pack(">H", port), op)


def _name(device: str) -> bytes:
    return device.encode().ljust(16, b"\0")


def came_from(device: str) -> tuple[bytes, ...]:
    """Match packets that came in by `device`."""
    return meta(_META_IIFNAME), compare(_name(device))


def goes_elsewhere_than(device: str) -> tuple[bytes, ...]:
    """Match packets that leave by another device."""
    return meta(_META_OIFNAME), compare(_name(device), NEQ)


def goes_to(device: str) -> tuple[bytes, ...]:
    """Match packets that leave by `device`."""
    return meta(_META_OIFNAME), compare(_name(device))


def comes_from_elsewhere_than(device: str) -> tuple[bytes, ...]:
    """Match packets that came in by another device."""
    return meta(_META_IIFNAME), compare(_name(device), NEQ)


def comes_from_no(prefix: str) -> tuple[bytes, ...]:
    """Match packets that came in by a device whose name does not begin with `prefix`."""
    return meta(_META_IIFNAME), compare(prefix.encode(), NEQ)


def is_to_the_host() -> tuple[bytes, ...]:
    """Match packets to an address of the host itself."""
    fib = expression("fib", be32(1, REGISTER), be32(2, _FIB_ADDRESS_TYPE), be32(3, _FIB_TO))
    return fib, compare(struct.pack("=I", _LOCAL_ADDRESS))


def is_not_to_loopback() -> tuple[bytes, ...]:
    """Match IPv4 packets that do not go to 127.0.0.0/8."""
    return load(_NETWORK, 16, 1), compare(b"\x7f", NEQ)


def redirect_to(address: IPv4Address | IPv6Address, port: int) -> tuple[bytes, ...]:
    """Rewrite the destination. Only for nat chains of the hooks prerouting and output."""
    return (
        immediate(REGISTER, address.packed),
        immediate(_SECOND_REGISTER, struct.pack(">H", port)),
        expression(
            "nat",
            be32(1, _TO_DESTINATION),
            be32(2, _NF_IPV4 if address.version == 4 else _NF_IPV6),
            be32(3, REGISTER),
            be32(5, _SECOND_REGISTER),
        ),
    )


def immediate(register: int, value: bytes) -> bytes:
    """Load a constant."""
    return expression("immediate", be32(1, register), nest(2, attr(1, value)))


@functools.cache
def counter() -> bytes:
    """Count the packets that reach this expression of a rule."""
    return expression("counter")


def masquerade() -> bytes:
    """Rewrite the source to the outgoing address."""
    return expression("masq")


def is_port_unreachable() -> tuple[bytes, ...]:
    """Match an ICMP error that a port is closed; match the protocol first."""
    return load(TRANSPORT, 0, 2), compare(b"\x03\x03")


@functools.cache
def exceeds(rate_hz: int, burst: int) -> bytes:
    """Match packets beyond a rate. Each rule with this match counts its own packets."""
    return expression(
        "limit",
        be64(1, rate_hz),
        be64(2, 1),
        be32(3, burst),
        be32(4, _LIMIT_PACKETS),
        be32(5, _LIMIT_EXCEEDED),
    )


@functools.cache
def verdict(what: NftVerdict) -> bytes:
    """End the rule with `what`."""
    return expression("immediate", be32(1, VERDICT_REGISTER), nest(2, nest(2, be32(1, int(what)))))


def rule(chain: str, *parts: Iterable[bytes] | bytes) -> NftRule:
    """Return a rule of matches and statements."""
    flat: list[bytes] = []
    for part in parts:
        flat.extend((part,) if isinstance(part, bytes) else part)
    return NftRule(chain, tuple(flat))


def established() -> tuple[bytes, ...]:
    """Match packets of established connections, and packets that are related to a connection."""
    return _connection(_CT_STATE, _CT_ESTABLISHED_OR_RELATED)


def redirected() -> tuple[bytes, ...]:
    """Match packets of connections whose destination was rewritten."""
    return _connection(_CT_STATUS, _CT_DESTINATION_REWRITTEN)


def _connection(key: int, bits: int) -> tuple[bytes, ...]:
    """Match packets whose connection has one of `bits` in the property `key`."""
    loaded = expression("ct", be32(1, REGISTER), be32(2, key))
    return loaded, masked(struct.pack("=I", bits)), compare(bytes(4), NEQ)
