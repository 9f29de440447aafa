"""IPv6 of guests that CNI plugins connect: addresses, router, name servers, reach, end."""

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Interface, IPv6Network
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import ALL_ROUTERS, ICMP6, TCP, Guest6, ia, option
from services.netd.tests.pretended_host import Guest, Node
from services.netd.tests.segment import FAR_NETNS, run
from services.netd.tests.test_cni import A, bridge, conflist, without_bridge
from services.netd.tests.test_ipv6 import FAR6, FORWARDING, HOST6, syn, world6
from services.netd.tests.test_path_check import look

from virtbus.netd.core.dhcp6 import MessageType6 as Kind
from virtbus.netd.core.dhcp6 import Option6
from virtbus.netd.core.reach import ReachRules

pytestmark = pytest.mark.integration

GATEWAY = IPv6Address("fd00:88::1")
SERVER = IPv6Address("fd00:53::1")
FOUR, SIX = {"subnet": "10.88.0.0/24"}, {"subnet": "fd00:88::/64"}
WITH_MAC = {"mac": True, "ips": True}


def ipam(node: Node, *subnets: dict[str, Any], **more: Any) -> dict[str, Any]:
    routes = [{"dst": "::/0"}, {"dst": "fd00:7::/48"}]
    every = routes if FOUR not in subnets else [{"dst": "0.0.0.0/0"}, *routes]
    ranges = [[subnet] for subnet in subnets]
    data = str(node.host.tmp / "ipam")
    return {"type": "host-local", "ranges": ranges, "routes": every, "dataDir": data, **more}


def lan(node: Node, *subnets: dict[str, Any], **more: Any) -> None:
    dns = {"nameservers": [str(SERVER)], "search": ["six.example"]}
    plugin = bridge(node, ipMasq=True, dns=dns, capabilities=WITH_MAC, ipam=ipam(node, *subnets))
    conflist(node, "lan", plugin | more)


def leases(node: Node) -> list[str]:
    paths = (node.host.tmp / "ipam" / "lan").glob("*")
    return sorted(path.name for path in paths if path.name[:2] in {"10", "fd"})


@contextmanager
def surroundings() -> Iterator[None]:
    """The outside has IPv6; what the plugins leave on the host ends with the context."""
    try:
        with world6():
            yield
    finally:
        without_bridge()
        FORWARDING.write_text("0")
        subprocess.run(["nft", "flush", "ruleset"], check=True)


def rules6() -> str:
    return run("ip6tables-save")


def six(node: Node, guest: Guest) -> Guest6:
    (attachment,) = node.attachments.ready()
    return Guest6(guest, IPv6Interface(attachment.nics[0].addresses6[0]).ip)


async def advertised(guest: Guest6) -> bytes:
    """Return the frame that answers a router solicitation of the guest."""
    while not guest.guest.frames.empty():
        guest.guest.frames.get_nowait()
    asked = bytes((133, *bytes(7)))
    frame = guest.frame(b"\x33\x33\0\0\0\2", ALL_ROUTERS, ICMP6, asked, source=guest.link_local)
    for _attempt in range(20):
        guest.guest.send(frame)
        with suppress(TimeoutError):
            return await guest.guest.receive(lambda f: f[20] == ICMP6 and f[54] == 134, 0.5)
    raise TimeoutError("no router advertises itself")


async def connects(guest: Guest6, to: IPv6Address, port: int) -> bool:
    """Return True if anything answers a SYN to `to`, sent by the gateway."""
    mac = await guest.resolve(GATEWAY)
    guest.guest.send(guest.frame(mac, to, TCP, syn((40000, port))))
    wanted = port.to_bytes(2, "big")
    try:
        await guest.guest.receive(lambda f: f[20] == TCP and f[54:56] == wanted, timeout_s=0.5)
    except TimeoutError:
        return False
    return True


async def test_a_guest_of_both_versions_has_addresses_a_router_and_name_servers(node: Node) -> None:
    lan(node, FOUR, SIX)
    with surroundings():
        (interface,) = (await node.attach(A, networks=("lan",))).interfaces
        four, address = interface.addresses
        assert (four[:8], address[:10]) == ("10.88.0.", "fd00:88::2")
        assert (interface.gateway, interface.gateway6) == ("10.88.0.1", str(GATEWAY))
        assert node.inside(A, "ip -o addr show dev eth0") == ""
        own = IPv6Interface(address).ip
        async with node.guest(A) as plain:
            guest = six(node, plain)
            await guest.ping(GATEWAY)
            await guest.ping(FAR6, via=GATEWAY)
            frame = await advertised(guest)
            router = IPv6Address(frame[22:38])
            assert router != IPv6Address("fe80::1")
            await guest.ping(FAR6, via=router)  # the guest's default route
            assert int.from_bytes(frame[60:62], "big") >= 3600
            assert IPv6Network("fd00:7::/48").network_address.packed in frame
            kind, options = await guest.ask(Kind.SOLICIT, ia())
            assert (kind, own.packed in options) == (Kind.ADVERTISE, True)
            assert option(Option6.DNS, SERVER.packed) in options
            assert b"\x03six\x07example\0" in options
            await node.restart()
            assert IPv6Address((await advertised(guest))[22:38]) == router
            ping = await asyncio.create_subprocess_exec(
                *f"ping -6 -c 1 -W 3 {own}".split(), stdout=subprocess.DEVNULL
            )
            plain.send(guest.advertisement(own))
            await plain.receive(lambda f: f[20] == ICMP6 and f[54] == 128)
            ping.kill()
            await ping.wait()
        assert "fd00:88::" in rules6()
        await node.attachments.release(A, 1)
        assert leases(node) == []
        assert "fd00:88::2" not in rules6()


async def test_a_guest_with_ipv6_only_asks_for_an_address(node: Node) -> None:
    lan(node, SIX)
    with surroundings():
        asked = {"networks": ("lan",), "nics": ({"addresses": ["fd00:88::77"]},)}
        (interface,) = (await node.attach(A, **asked)).interfaces
        assert (interface.addresses, interface.gateway) == (("fd00:88::77/64",), "")
        async with node.guest(A) as plain:
            guest = six(node, plain)
            await guest.ping(FAR6, via=GATEWAY)
            kind, options = await guest.ask(Kind.SOLICIT, ia())
            assert (kind, guest.address.packed in options) == (Kind.ADVERTISE, True)
            await node.restart()
            await guest.ping(FAR6, via=GATEWAY)
            assert (await look(node)).faults == ()
            own = IPv4Address("10.88.0.9")
            for frame in (
                plain.udp(b"\xff" * 6, own, (1, 1), b"", source=own),
                plain.arp(1, b"\xff" * 6, own, sender=(plain.mac, own)),
            ):
                plain.send(frame)
            await guest.ping(FAR6, via=GATEWAY)
            assert node.counters(A).interfaces[0].refused == {"address": 1, "arp": 1}
        await node.attachments.release(A, 1)
        assert leases(node) == []


async def test_a_guest_behind_nat_has_ipv6_alone_if_its_network_has(node: Node) -> None:
    lan(node, SIX)
    with surroundings():
        masked = {"binding": "masquerade", "ports": [{"port": 53, "protocol": "udp"}]}
        ready = await node.attach(A, networks=("lan",), nics=(masked,))
        assert ready.interfaces[0].guest_addresses == ("fd10:0:2::2/120",)
        async with node.guest(A) as plain:
            guest = Guest6(plain, IPv6Address("fd10:0:2::2"))
            await guest.ping(FAR6, via=IPv6Address("fd10:0:2::1"))
            kind, options = await guest.ask(Kind.SOLICIT, ia())
            assert (kind, guest.address.packed in options) == (Kind.ADVERTISE, True)
            await node.restart()
            assert await node.attachments.compare() == []
        await node.attachments.release(A, 1)


async def test_a_guest_reaches_no_host_by_ipv6(node: Node) -> None:
    lan(node, FOUR, SIX)
    with surroundings(), listening_six(22):
        await node.attach(A, networks=("lan",))
        async with node.guest(A) as plain:
            guest = six(node, plain)
            router = IPv6Address((await advertised(guest))[22:38])
            for address in (GATEWAY, HOST6, router):
                assert not await connects(guest, address, 22)
            local = Guest6(plain, guest.link_local)
            assert not await connects(local, router, 22)
            assert await connects(guest, FAR6, 22)
            node.doors.bridge.reach = ReachRules(hosts=frozenset({FAR6}))
            node.doors.attachers.plugin_reach.sync()
            assert not await connects(guest, FAR6, 22)
            opened = (IPv6Network(f"{HOST6}/128"),)
            node.doors.bridge.reach = ReachRules(hosts=frozenset({FAR6}), opened=opened)
            node.doors.attachers.plugin_reach.sync()
            assert await connects(guest, HOST6, 22)
        await node.attachments.release(A, 1)


async def test_the_tap_limits_ipv6_of_a_guest_on_a_macvlan_link(node: Node) -> None:
    host = IPv6Address("fd00:88::99")
    node.reach = ReachRules(hosts=frozenset({host}))
    node.plugin_timeout_s = 10.0  # macvlan looks for duplicates of the address
    await node.restart()
    run(f"ip netns add {FAR_NETNS}")
    try:
        run(f"ip link add und0 type veth peer name und1 netns {FAR_NETNS}")
        run("ip link set und0 up")
        for address in (GATEWAY, host):
            run(f"ip -n {FAR_NETNS} addr add {address}/64 dev und1 nodad")
        run(f"ip -n {FAR_NETNS} link set und1 up")
        plugin = {"type": "macvlan", "master": "und0", "capabilities": WITH_MAC}
        conflist(node, "lan", plugin | {"ipam": ipam(node, FOUR, SIX)})
        (interface,) = (await node.attach(A, networks=("lan",))).interfaces
        async with node.guest(A) as plain:
            guest = six(node, plain)
            await guest.ping(GATEWAY)
            assert await connects(guest, GATEWAY, 22)
            assert not await connects(guest, host, 22)
            assert node.counters(A).interfaces[0].refused["reach"] == 1
            frame = await advertised(guest)  # the router there advertises itself
            assert (frame[60:62], interface.gateway6) == (bytes(2), str(GATEWAY))
        await node.attachments.release(A, 1)
    finally:
        subprocess.run(["ip", "link", "del", "und0"], check=False)
        run(f"ip netns del {FAR_NETNS}")


@contextmanager
def listening_six(port: int) -> Iterator[None]:

    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("::", port))
        listener.listen()
        yield
