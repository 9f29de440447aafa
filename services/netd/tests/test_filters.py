"""Forbidden frames of a guest are dropped at its tap: live packets, not rule texts (NET-06)."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Node, checksum

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Address("10.127.0.1")
OTHER_MAC = bytes.fromhex("020000000099")
BROADCAST = b"\xff" * 6


class Wire:
    """Everything that arrives on the host bridge."""

    def __init__(self, packets: socket.socket) -> None:
        self._packets = packets

    def seen(self, mark: bytes) -> bool:
        """Return True if a frame with `mark` came: it is here before the sender's write ends."""
        found = False
        with contextlib.suppress(BlockingIOError):
            while True:
                found |= mark in self._packets.recv(65536)
        return found


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as packets:
        packets.bind(("virtbus0", 3))
        packets.setblocking(False)
        yield Wire(packets)


def tcp(guest: Guest, port: int, data: bytes, **options: Any) -> bytes:
    """A broadcast frame with TCP for a port of the gateway, without a checksum."""
    header = struct.pack("!HHIIBBHHH", 4000, port, 1, 1, 5 << 4, 16, 1024, 0, 0)
    return guest.ipv4(BROADCAST, GATEWAY, 6, header + data, **options)


def forbidden(guest: Guest) -> dict[str, bytes]:
    """Frames that must not leave the tap, each with the mark in it."""
    mark = b"virtbus-mark"
    ip6 = (
        b"\x60\0\0\0" + struct.pack("!HBB", len(mark) + 4, 58, 255) + bytes(15) + b"\1" + bytes(16)
    )
    other = IPv4Address("10.127.9.9")
    dhcp = (67, 68)
    vlan = BROADCAST + guest.mac + b"\x81\x00\x00\x05"
    good = guest.udp(BROADCAST, GATEWAY, (1000, 1000), mark)
    return {
        "foreign source MAC of TCP": tcp(guest, 80, mark, source_mac=OTHER_MAC),
        "foreign source address of TCP": tcp(guest, 80, mark, source=other),
        "VLAN of TCP": vlan + tcp(guest, 80, mark)[12:],
        "foreign source MAC": guest.udp(BROADCAST, GATEWAY, (1, 1), mark, source_mac=OTHER_MAC),
        "foreign source address": guest.udp(BROADCAST, GATEWAY, (1, 1), mark, source=other),
        "no source address": guest.udp(BROADCAST, GATEWAY, (1, 1), mark, source=IPv4Address(0)),
        "DHCP server": guest.udp(BROADCAST, GATEWAY, dhcp, mark),
        "DHCP client": guest.udp(BROADCAST, GATEWAY, (68, 67), mark),
        "ARP for the gateway": guest.arp(2, BROADCAST, other, sender=(guest.mac, GATEWAY)) + mark,
        "ARP with another MAC": guest.arp(2, BROADCAST, other, sender=(OTHER_MAC, guest.ip)) + mark,
        "ARP probe with another MAC": guest.arp(
            1, BROADCAST, other, sender=(OTHER_MAC, IPv4Address(0))
        )
        + mark,
        "router advertisement": BROADCAST + guest.mac + b"\x86\xdd" + ip6 + b"\x86\0\0\0" + mark,
        "neighbour advertisement": BROADCAST + guest.mac + b"\x86\xdd" + ip6 + b"\x88\0\0\0" + mark,
        "VLAN": vlan + good[12:],
        "VLAN in VLAN": vlan[:-4] + b"\x88\xa8\x00\x06\x81\x00\x00\x05" + good[12:],
        "priority tag": BROADCAST + guest.mac + b"\x81\x00\x00\x00" + good[12:],
        "STP": bytes.fromhex("0180c2000000") + guest.mac + b"\0\x26\x42\x42\3" + mark,
        "LLDP": bytes.fromhex("0180c200000e") + guest.mac + b"\x88\xcc" + mark,
        "truncated ARP": BROADCAST + guest.mac + b"\x08\x06" + mark,
    }


async def test_forbidden_frames_stay_in_the_tap_and_allowed_ones_pass(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        with wire() as host:
            passed = [name for name, frame in forbidden(guest).items() if sent(guest, host, frame)]
            assert passed == []
            allowed = guest.udp(BROADCAST, GATEWAY, (1000, 1000), b"virtbus-mark")
            assert sent(guest, host, allowed)
            assert sent(guest, host, tcp(guest, 80, b"virtbus-mark"))
            probe = guest.arp(1, BROADCAST, guest.ip, sender=(guest.mac, IPv4Address(0)))
            assert sent(guest, host, probe + b"virtbus-mark")


def sent(guest: Guest, host: Wire, frame: bytes) -> bool:
    guest.send(frame.ljust(60, b"\0"))
    return host.seen(b"virtbus-mark")


async def test_a_guest_cannot_flood_the_tcp_port_of_the_resolver(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        with wire() as host:
            query, other = tcp(guest, 53, b"virtbus-mark"), tcp(guest, 80, b"virtbus-mark")
            assert sum(sent(guest, host, query) for _ in range(2000)) < 1000
            assert all(sent(guest, host, other) for _ in range(1000))


async def test_fragments_cannot_carry_a_dhcp_server_past_the_filter(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        with wire() as host:
            whole = guest.udp(BROADCAST, GATEWAY, (67, 68), b"virtbus-mark" + bytes(20))
            first = bytearray(whole)
            first[20:22] = b"\x20\x00"
            first[24:26] = b"\0\0"
            first[24:26] = struct.pack("!H", checksum(bytes(first[14:34])))
            assert not sent(guest, host, bytes(first))


@pytest.mark.parametrize("event", ["restart", "second interface", "new guest"])
async def test_the_filter_holds_after(node: Node, event: str) -> None:
    networks = ("default", "default") if event == "second interface" else ("default",)
    await node.attach(A, networks=networks)
    if event == "restart":
        await node.restart()
    if event == "new guest":
        async with node.guest(A) as former:
            await former.ping(GATEWAY)
    async with node.guest(A, len(networks) - 1) as guest:
        await guest.ping(GATEWAY)
        with wire() as host:
            frame = guest.udp(BROADCAST, GATEWAY, (1, 1), b"virtbus-mark", source=IPv4Address(1))
            assert not sent(guest, host, frame)


async def test_the_filter_is_there_before_the_tap_is_up(node: Node) -> None:
    """The netdev chain names its device, and the tap comes up last: both appear together."""
    await node.attach(A)
    rules = node.inside(A, "nft list ruleset")
    assert 'hook ingress device "tap0" priority filter; policy drop' in rules
    assert node.inside(A, "cat /proc/sys/net/ipv6/conf/tap0/disable_ipv6").strip() == "1"
