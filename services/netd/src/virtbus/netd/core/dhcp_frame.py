"""Builds and parses the Ethernet, IPv4 and UDP headers of DHCP messages.

It also builds the filter of the receiving socket.
"""

import struct
from ipaddress import IPv4Address

from virtbus.netd.core.dhcp import DhcpAnswer

SERVER_PORT, CLIENT_PORT = 67, 68
_BROADCAST_MAC = b"\xff" * 6
_ETHERNET_BYTES, _IP_BYTES, _UDP_BYTES = 14, 20, 8
_UDP = 17
_MORE_OR_OFFSET = 0x3FFF

# Classic BPF opcodes (linux/bpf_common.h).
_LDH, _LDB, _LDW = 0x28, 0x30, 0x20
_LDX_IP_LENGTH, _LDH_INDEXED = 0xB1, 0x48
_JUMP_IF_EQUAL, _JUMP_IF_SET, _RETURN = 0x15, 0x45, 0x06
_MAX_FRAME_BYTES = 2048
_DROP = 99
_PACKET_TYPE, _PACKET_OUTGOING = 0xFFFFF004, 4
"""The ancillary load of a packet's direction (`SKF_AD_PKTTYPE`)."""


def request_filter(mac: bytes) -> list[tuple[int, int, int, int]]:
    """Return BPF instructions that pass only unfragmented UDP datagrams to port 67 from `mac`."""
    drop = _DROP
    source = [
        (_LDW, 0, drop, 8),
        (_JUMP_IF_EQUAL, 0, drop, int.from_bytes(mac[2:], "big")),
        (_LDH, 0, drop, 6),
        (_JUMP_IF_EQUAL, 0, drop, int.from_bytes(mac[:2], "big")),
    ]
    return _datagrams(source, SERVER_PORT)


def reply_filter() -> list[tuple[int, int, int, int]]:
    """Return BPF instructions that pass only unfragmented UDP datagrams to port 68.

    They must leave by the link: a guest must not answer itself.
    """
    drop = _DROP
    leaving = [(_LDW, 0, drop, _PACKET_TYPE), (_JUMP_IF_EQUAL, 0, drop, _PACKET_OUTGOING)]
    return _datagrams(leaving, CLIENT_PORT)


def _datagrams(
    first: list[tuple[int, int, int, int]], port: int
) -> list[tuple[int, int, int, int]]:
    """Return instructions that pass unfragmented UDP datagrams to `port`, after those of `first`.

    A jump to `_DROP` goes to the last instruction.
    """
    drop = _DROP
    program = [
        *first,
        (_LDH, 0, drop, 12),
        (_JUMP_IF_EQUAL, 0, drop, 0x0800),
        (_LDB, 0, drop, 23),
        (_JUMP_IF_EQUAL, 0, drop, _UDP),
        (_LDH, 0, drop, 20),
        (_JUMP_IF_SET, drop, 0, _MORE_OR_OFFSET),
        (_LDX_IP_LENGTH, 0, drop, _ETHERNET_BYTES),
        (_LDH_INDEXED, 0, drop, _ETHERNET_BYTES + 2),
        (_JUMP_IF_EQUAL, 0, drop, port),
        (_RETURN, 0, 0, _MAX_FRAME_BYTES),
        (_RETURN, 0, 0, 0),
    ]
    last = len(program) - 1
    jumps = {_JUMP_IF_EQUAL, _JUMP_IF_SET}
    return [
        (
            code,
            (last - at - 1 if yes == drop else yes) if code in jumps else 0,
            (last - at - 1 if no == drop else no) if code in jumps else 0,
            value,
        )
        for at, (code, yes, no, value) in enumerate(program)
    ]


def payload(frame: bytes, port: int = SERVER_PORT) -> bytes | None:
    """Return the DHCP message in a frame to `port`; None if lengths are inconsistent."""
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
    checksum = _checksum(addresses + struct.pack("!HH", _UDP, length) + udp) or 0xFFFF
    udp = udp[:6] + struct.pack("!H", checksum) + udp[8:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, _IP_BYTES + length, 0, 0, 64, _UDP, 0) + addresses
    ip = ip[:10] + struct.pack("!H", _checksum(ip)) + ip[12:]
    target = guest_mac if reply.unicast else _BROADCAST_MAC
    return target + server_mac + b"\x08\x00" + ip + udp


def _checksum(data: bytes) -> int:
    """Return the internet checksum (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
