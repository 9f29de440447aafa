"""Ethernet, IPv4 and UDP headers of DHCP messages, and BPF filters of the receiving sockets."""

import struct
from ipaddress import IPv4Address

from virtbus.netd.core.dhcp import DhcpAnswer

SERVER_PORT, CLIENT_PORT = 67, 68
_BROADCAST_MAC = b"\xff" * 6
_ETHERNET_BYTES, _IP_BYTES, _UDP_BYTES = 14, 20, 8
_UDP = 17
_ETHERTYPE_IPV6, _IPV6_BYTES, _ICMP6 = 0x86DD, 40, 58
_SERVER6_PORT, _ROUTER_SOLICITATION = 547, 133
_MORE_OR_OFFSET = 0x3FFF

# Classic BPF opcodes (linux/bpf_common.h).
_LDH, _LDB, _LDW = 0x28, 0x30, 0x20
_LDX_IP_LENGTH, _LDH_INDEXED = 0xB1, 0x48
_JUMP_IF_EQUAL, _JUMP_IF_SET, _RETURN = 0x15, 0x45, 0x06
_MAX_FRAME_BYTES = 2048
_PACKET_TYPE, _PACKET_OUTGOING = 0xFFFFF004, 4
"""The ancillary load of a packet's direction (`SKF_AD_PKTTYPE`)."""

_Step = tuple[int, str, str, int]
"""An instruction of BPF. Its jumps go to labels. An empty label means the next instruction."""
BpfStep = tuple[int, int, int, int]
"""An instruction as the kernel takes it. Its jumps are distances."""


def request_filter(mac: bytes) -> list[BpfStep]:
    """Return BPF instructions that pass only frames from `mac` that are requests to netd.

    In IPv4, these are unfragmented UDP datagrams to port 67. In IPv6, these are UDP datagrams to
    port 547 and router solicitations, directly behind the IPv6 header.
    """
    source: list[_Step] = [
        (_LDW, "", "", 8),
        (_JUMP_IF_EQUAL, "", "drop", int.from_bytes(mac[2:], "big")),
        (_LDH, "", "", 6),
        (_JUMP_IF_EQUAL, "", "drop", int.from_bytes(mac[:2], "big")),
        (_LDH, "", "", 12),
        (_JUMP_IF_EQUAL, "", "ipv6", 0x0800),
    ]
    six: list[_Step] = [
        (_JUMP_IF_EQUAL, "", "drop", _ETHERTYPE_IPV6),
        (_LDB, "", "", _ETHERNET_BYTES + 6),
        (_JUMP_IF_EQUAL, "", "icmp6", _UDP),
        (_LDH, "", "", _ETHERNET_BYTES + _IPV6_BYTES + 2),
        (_JUMP_IF_EQUAL, "pass", "drop", _SERVER6_PORT),
        (_JUMP_IF_EQUAL, "", "drop", _ICMP6),
        (_LDB, "", "", _ETHERNET_BYTES + _IPV6_BYTES),
        (_JUMP_IF_EQUAL, "pass", "drop", _ROUTER_SOLICITATION),
    ]
    before = [*source, *_datagrams(SERVER_PORT)]
    return _assembled([*before, *six], {"ipv6": len(before), "icmp6": len(before) + 5})


def reply_filter() -> list[BpfStep]:
    """Return BPF instructions that pass only unfragmented UDP datagrams to port 68.

    The datagrams must leave the host towards the guest, so that no guest can answer itself.
    """
    leaving: list[_Step] = [
        (_LDW, "", "", _PACKET_TYPE),
        (_JUMP_IF_EQUAL, "", "drop", _PACKET_OUTGOING),
        (_LDH, "", "", 12),
        (_JUMP_IF_EQUAL, "", "drop", 0x0800),
    ]
    return _assembled([*leaving, *_datagrams(CLIENT_PORT)], {})


def _datagrams(port: int) -> list[_Step]:
    return [
        (_LDB, "", "", 23),
        (_JUMP_IF_EQUAL, "", "drop", _UDP),
        (_LDH, "", "", 20),
        (_JUMP_IF_SET, "drop", "", _MORE_OR_OFFSET),
        (_LDX_IP_LENGTH, "", "", _ETHERNET_BYTES),
        (_LDH_INDEXED, "", "", _ETHERNET_BYTES + 2),
        (_JUMP_IF_EQUAL, "pass", "drop", port),
    ]


def _assembled(steps: list[_Step], labels: dict[str, int]) -> list[BpfStep]:
    """Return the program with its two ends, `pass` and `drop`, and distances instead of labels."""
    program: list[_Step] = [*steps, (_RETURN, "", "", _MAX_FRAME_BYTES), (_RETURN, "", "", 0)]
    places = {**labels, "pass": len(steps), "drop": len(steps) + 1}

    def jump(at: int, way: str) -> int:
        return places[way] - at - 1 if way else 0

    return [
        (code, jump(at, yes), jump(at, no), value)
        for at, (code, yes, no, value) in enumerate(program)
    ]


def payload(frame: bytes, port: int = SERVER_PORT) -> bytes | None:
    """Return the DHCP message in a frame; None if the port differs, or lengths do not fit."""
    if len(frame) < _ETHERNET_BYTES + _IP_BYTES + _UDP_BYTES:
        return None
    header = frame[_ETHERNET_BYTES]
    start = _ETHERNET_BYTES + (header & 0xF) * 4
    total = int.from_bytes(frame[16:18], "big")
    end = min(len(frame), _ETHERNET_BYTES + total)
    if header >> 4 != 4 or start < _ETHERNET_BYTES + _IP_BYTES or start + _UDP_BYTES > end:
        return None
    _source, destination, length, _checksum = struct.unpack_from("!HHHH", frame, start)
    if destination != port or length < _UDP_BYTES or start + length > end:
        return None
    return frame[start + _UDP_BYTES : start + length]


def reply_frame(
    reply: DhcpAnswer, server: IPv4Address, server_mac: bytes, guest_mac: bytes
) -> bytes:
    """Return the frame that carries `reply` to the guest."""
    length = _UDP_BYTES + len(reply.message)
    addresses = server.packed + reply.destination.packed
    udp = struct.pack("!HHHH", SERVER_PORT, CLIENT_PORT, length, 0) + reply.message
    checksum = internet_checksum(addresses + struct.pack("!HH", _UDP, length) + udp) or 0xFFFF
    udp = udp[:6] + struct.pack("!H", checksum) + udp[8:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, _IP_BYTES + length, 0, 0, 64, _UDP, 0) + addresses
    ip = ip[:10] + struct.pack("!H", internet_checksum(ip)) + ip[12:]
    target = guest_mac if reply.unicast else _BROADCAST_MAC
    return target + server_mac + b"\x08\x00" + ip + udp


def internet_checksum(data: bytes) -> int:
    """Return the internet checksum (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
