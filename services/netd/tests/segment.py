"""A segment outside of virtbus: a bridge of the host, and a namespace on it with a DHCP server."""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import Path

from services.netd.tests.pretended_host import Frames, Guest, Node, enter

from virtbus.netd.core.dhcp import MessageType, Offer, answer, parse
from virtbus.netd.core.dhcp_frame import SERVER_PORT, payload, reply_frame
from virtbus.netd.core.reach import METADATA
from virtbus.schemas.node_rpc import NetReady

BRIDGE = "br-lan"
OUTSIDE, FAR_NETNS = (f"vbtest-{name}-{os.getpid()}" for name in ("lan", "far"))
"""Namespaces, with other names in each process: tests run side by side in one host."""
SERVER = IPv4Address("192.0.2.1")
FIRST = IPv4Interface("192.0.2.10/24")
BROADCAST = b"\xff" * 6
HOST = IPv4Address("192.0.2.99")
OTHER_MAC = bytes.fromhex("020000000099")
SERVER_MAC = bytes.fromhex("020000000001")


def run(command: str) -> str:
    done = subprocess.run(command.split(), check=True, capture_output=True, text=True)
    return done.stdout


@dataclass
class Segment:
    """The far end of the segment: frames of guests come out of `packets`, and answers go in."""

    packets: socket.socket

    async def marks(self, end: bytes) -> str:
        """Return the frames that came before the one with `end`, as text."""
        loop, found = asyncio.get_running_loop(), b""
        async with asyncio.timeout(5):
            while end not in found:
                found += await loop.sock_recv(self.packets, 65536)
        return found.decode("latin1")

    async def answer_dhcp(self, address: IPv4Interface) -> None:
        """Answer each DHCP request with an address; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            frame = await loop.sock_recv(self.packets, 65536)
            message = payload(frame, SERVER_PORT) if frame[12:14] == b"\x08\x00" else None
            request = parse(message) if message is not None else None
            offer = (
                Offer(request.mac, address, SERVER, SERVER_MAC, router=SERVER) if request else None
            )
            reply = answer(request, offer) if request and offer else None
            if request and reply:
                self.packets.send(reply_frame(reply, SERVER, SERVER_MAC, request.mac))


def wanted(guest: Guest, address: IPv4Interface) -> bytes:
    """Return the guest's DHCP request for an address."""
    fixed = struct.pack("!BBBBIHH", 1, 1, 6, 0, 77, 0, 0x8000) + bytes(16) + guest.mac + bytes(202)
    options = b"\x63\x82\x53\x63" + bytes((53, 1, MessageType.REQUEST, 50, 4)) + address.ip.packed
    return guest.udp(
        BROADCAST,
        IPv4Address("255.255.255.255"),
        (68, 67),
        fixed + options + b"\xff",
        source=IPv4Address(0),
    )


async def lease(
    node: Node, guest: Guest, far: Segment, address: IPv4Interface = FIRST
) -> NetReady | None:
    """Let the guest ask for an address until the segment gives it; return what netd reports.

    A guest repeats its request: the first one may come before the links are up.
    """
    async with asyncio.TaskGroup() as group:
        server = group.create_task(far.answer_dhcp(address))
        for _attempt in range(20):
            guest.send(wanted(guest, address))
            await asyncio.sleep(0.25)
            if not node.leases.empty():
                break
        server.cancel()
    guest.ip = address.ip
    ready = await node.next_lease()
    while not node.leases.empty():
        node.leases.get_nowait()
    return ready


@contextmanager
def segment(link: str = BRIDGE, *, mtu: int = 1500) -> Iterator[Segment]:
    """Make the bridge, and a cable from it to the outside; remove both afterwards."""
    run(f"ip link add {link} type bridge")
    run(f"ip netns add {OUTSIDE}")
    try:
        run(f"ip link add lan0 type veth peer name lan1 netns {OUTSIDE}")
        run(f"ip link set lan0 master {link} up mtu {mtu}")
        run(f"ip link set {link} up")
        run(f"ip -n {OUTSIDE} link set lan1 up mtu {mtu}")
        run(f"ip -n {OUTSIDE} link set lo up")
        with outside(OUTSIDE, "lan1") as packets:
            yield Segment(packets)
    finally:
        run(f"ip netns del {OUTSIDE}")
        subprocess.run(f"ip link del {link}".split(), check=False)
        subprocess.run(["ip", "link", "del", "lan0"], check=False, capture_output=True)


@contextmanager
def outside(netns: str, link: str) -> Iterator[socket.socket]:
    """Return a packet socket on a link of a namespace."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns") / netns, os.O_RDONLY)
    try:
        enter(there)
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        packets.bind((link, 3))
    finally:
        enter(here)
        os.close(there)
        os.close(here)
    packets.setblocking(False)
    with packets:
        yield packets


async def ping_from_outside(address: IPv4Address | IPv6Address) -> bool:
    """Return True if a host on the segment reaches the address."""
    return await ping_from(OUTSIDE, address)


async def ping_from(netns: str, address: IPv4Address | IPv6Address) -> bool:
    """Return True if the address answers an echo request from a namespace."""
    ping = f"ip netns exec {netns} ping -c 1 -W 2 {address}"
    process = await asyncio.create_subprocess_exec(*ping.split(), stdout=subprocess.DEVNULL)
    return await process.wait() == 0


def crafted(guest: Frames) -> dict[str, tuple[str, bytes]]:
    """Frames that must not reach the segment, each with the rule that counts it."""
    other, gateway, host = (IPv4Address(int(guest.ip) & ~0xFF | last) for last in (77, 1, 99))
    ip6 = b"\x60\0\0\0" + struct.pack("!HBB", 16, 58, 255) + bytes(15) + b"\1" + bytes(16)
    v6 = BROADCAST + guest.mac + b"\x86\xdd" + ip6
    plain = guest.udp(BROADCAST, other, (1000, 1000), b"vlan-tag")
    return {
        "foreign-mac": ("mac", guest.udp(BROADCAST, other, (1, 1), b"", source_mac=OTHER_MAC)),
        "foreign-ip": ("address", guest.udp(BROADCAST, other, (1, 1), b"", source=other)),
        "no-ip": ("address", guest.udp(BROADCAST, other, (1, 1), b"", source=IPv4Address(0))),
        "dhcp-server": ("dhcp", guest.udp(BROADCAST, other, (67, 68), b"")),
        "arp-gateway": ("arp", guest.arp(2, BROADCAST, other, sender=(guest.mac, gateway))),
        "arp-mac": ("arp", guest.arp(2, BROADCAST, other, sender=(OTHER_MAC, guest.ip))),
        "router-adv": ("protocol", v6 + b"\x86\0\0\0"),
        "neighbour-adv": ("protocol", v6 + b"\x88\0\0\0"),
        "vlan-tag": ("protocol", BROADCAST + guest.mac + b"\x81\0\0\5" + plain[12:]),
        "to-a-host": ("reach", guest.udp(BROADCAST, host, (1, 22), b"")),
        "to-metadata": ("reach", guest.udp(BROADCAST, METADATA, (1, 80), b"")),
        "dhcp-to-a-host": ("reach", guest.udp(BROADCAST, host, (68, 67), b"")),
    }


async def sent(guest: Guest, far: Segment) -> dict[str, list[str]]:
    """Send all crafted frames and a good one; return those that passed, and those of each rule."""
    counted: dict[str, list[str]] = {}
    for name, (rule, frame) in crafted(guest).items():
        guest.send(frame.ljust(60, b"\0") + b"<" + name.encode() + b">")
        counted.setdefault(rule, []).append(name)
    guest.send(guest.udp(BROADCAST, SERVER, (1000, 1000), b"the-end"))
    passed = await far.marks(b"the-end")
    return counted | {"passed": [name for name in crafted(guest) if f"<{name}>" in passed]}
