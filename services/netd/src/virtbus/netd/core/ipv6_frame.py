"""Ethernet, IPv6, UDP and ICMPv6 headers of messages to and from a guest."""

import struct
from ipaddress import IPv6Address
from typing import NamedTuple

from virtbus.netd.core.dhcp6 import Offer6
from virtbus.netd.core.dhcp_frame import internet_checksum
from virtbus.netd.core.router_advertisement import ROUTER_SOLICITATION

SERVER6_PORT, CLIENT6_PORT = 547, 546
ALL_NODES = IPv6Address("ff02::1")
UDP, ICMP6 = 17, 58
ETHERTYPE_IPV6 = 0x86DD
_ETHERNET_BYTES, _IPV6_BYTES, _UDP_BYTES = 14, 40, 8
_HOPS_OF_ND = 255


class Heard(NamedTuple):
    """A message of the guest. `dhcp` is a DHCPv6 message, or None for a router solicitation."""

    source: IPv6Address
    dhcp: bytes | None


def heard(frame: bytes) -> Heard | None:
    """Return the DHCPv6 message or router solicitation in a frame; None for any other frame."""
    start = _ETHERNET_BYTES + _IPV6_BYTES
    if len(frame) < start + _UDP_BYTES or frame[12:14] != struct.pack("!H", ETHERTYPE_IPV6):
        return None
    length, protocol, hops = struct.unpack_from("!HBB", frame, _ETHERNET_BYTES + 4)
    end = start + length
    if frame[_ETHERNET_BYTES] >> 4 != 6 or end > len(frame) or length < _UDP_BYTES:
        return None
    source = IPv6Address(frame[_ETHERNET_BYTES + 8 : _ETHERNET_BYTES + 24])
    if protocol == ICMP6:
        solicits = frame[start] == ROUTER_SOLICITATION and hops == _HOPS_OF_ND
        return Heard(source, None) if solicits else None
    _source, destination, size, _checksum = struct.unpack_from("!HHHH", frame, start)
    if protocol != UDP or destination != SERVER6_PORT or not _UDP_BYTES <= size <= length:
        return None
    if not source.is_link_local:
        return None
    return Heard(source, frame[start + _UDP_BYTES : start + size])


def dhcp6_frame(message: bytes, client: IPv6Address, offer: Offer6) -> bytes:
    """Return the frame with a DHCPv6 message to the guest."""
    length = _UDP_BYTES + len(message)
    udp = struct.pack("!HHHH", SERVER6_PORT, CLIENT6_PORT, length, 0) + message
    checksum = _checksum(offer.server, client, UDP, udp) or 0xFFFF
    udp = udp[:6] + struct.pack("!H", checksum) + udp[8:]
    return _frame(offer, client, UDP, udp, hops=64)


def advertisement_frame(message: bytes, offer: Offer6) -> bytes:
    """Return the frame with a router advertisement to the guest, in a packet to all nodes."""
    checksum = _checksum(offer.server, ALL_NODES, ICMP6, message)
    message = message[:2] + struct.pack("!H", checksum) + message[4:]
    return _frame(offer, ALL_NODES, ICMP6, message, hops=_HOPS_OF_ND)


def _frame(
    offer: Offer6, destination: IPv6Address, protocol: int, content: bytes, *, hops: int
) -> bytes:
    head = struct.pack("!IHBB", 6 << 28, len(content), protocol, hops)
    ethernet = offer.mac + offer.server_mac + struct.pack("!H", ETHERTYPE_IPV6)
    return ethernet + head + offer.server.packed + destination.packed + content


def _checksum(source: IPv6Address, destination: IPv6Address, protocol: int, content: bytes) -> int:
    pseudo = source.packed + destination.packed + struct.pack("!II", len(content), protocol)
    return internet_checksum(pseudo + content)


def link_local_of(mac: bytes) -> IPv6Address:
    """Return the link-local address that a guest derives from its MAC (RFC 4291, appendix A)."""
    eui = bytes((mac[0] ^ 2,)) + mac[1:3] + b"\xff\xfe" + mac[3:]
    return IPv6Address(b"\xfe\x80" + bytes(6) + eui)
