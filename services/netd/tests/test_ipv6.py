"""IPv6 of guests, with real frames: advertisements, DHCPv6, reach, and what is refused."""

import asyncio
import contextlib
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import ALL_ROUTERS, CLIENT_ID, ICMP6, TCP, Guest6, ia, option
from services.netd.tests.pretended_host import Guest, Host, Node
from services.netd.tests.segment import outside, run
from services.netd.tests.test_filters import Wire, sent, wire
from services.netd.tests.test_network_objects import target
from services.netd.tests.test_network_path import OUTER, world
from services.netd.tests.test_overlay_networks import overlay
from services.netd.tests.test_published import connects, published, reached

from virtbus.netd.core.dhcp6 import MessageType6 as Kind
from virtbus.netd.core.dhcp6 import Option6
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.namespaces import in_thread
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
HOST6, FAR6 = IPv6Address("2001:db8::1"), IPv6Address("2001:db8::2")
GATEWAY, ROUTER = IPv6Address("fd00:127::1"), IPv6Address("fe80::1")
MARK = b"virtbus-mark"
FORWARDING = Path("/proc/sys/net/ipv6/conf/all/forwarding")


@pytest.fixture
async def node6(host: Host) -> AsyncIterator[Node]:
    """A host whose built-in network has IPv6; afterwards it is unchanged."""
    before = host.census()
    made = Node(host, subnet6=f"{GATEWAY}/64")
    await made.start()
    try:
        yield made
    finally:
        await made.end()
    await host.returns_to(before)


def six(node: Node, uid: str, guest: Guest) -> Guest6:
    (attachment,) = [one for one in node.attachments.ready() if one.uid == uid]
    return Guest6(guest, IPv6Interface(attachment.nics[0].addresses6[0]).ip)


async def test_a_router_solicitation_is_answered_and_says_to_ask_dhcp(node6: Node) -> None:
    await node6.attach(A)
    async with node6.guest(A) as plain:
        guest = six(node6, A, plain)
        await guest.ping(GATEWAY)
        while not plain.frames.empty():
            plain.frames.get_nowait()
        asked, own = bytes((133, *bytes(7))), guest.link_local
        plain.send(guest.frame(b"\x33\x33\0\0\0\2", ALL_ROUTERS, ICMP6, asked, source=own))
        frame = await plain.receive(lambda f: f[20] == ICMP6 and f[54] == 134)
        assert frame[22:38] == ROUTER.packed
        assert frame[59] & 0xC0 == 0xC0  # managed and other
        assert int.from_bytes(frame[60:62], "big") >= 3600
        assert struct.pack("!BBBB", 3, 4, 64, 0x80) in frame  # on the link, no autoconfiguration


async def test_dhcpv6_gives_the_assigned_address_to_any_client_of_the_tap(node6: Node) -> None:
    (interface,) = (await node6.attach(A)).interfaces
    address = IPv6Interface(interface.addresses[1])
    assert (interface.gateway6, address.network.prefixlen) == (str(GATEWAY), 64)
    async with node6.guest(A) as plain:
        guest = six(node6, A, plain)
        kind, options = await guest.ask(Kind.SOLICIT, ia())
        assert kind == Kind.ADVERTISE
        assert address.ip.packed in options
        server = options[options.index(b"\0\2\0\x0a") :][:14]
        kind, options = await guest.ask(Kind.REQUEST, server, ia(address.ip))
        assert (kind, option(Option6.CLIENT_ID, CLIENT_ID) in options) == (Kind.REPLY, True)
        assert address.ip.packed in options
        kind, options = await guest.ask(Kind.SOLICIT, option(Option6.RAPID_COMMIT, b""), ia())
        assert (kind, address.ip.packed in options) == (Kind.REPLY, True)
        await node6.restart()
        kind, options = await guest.ask(Kind.RENEW, server, ia(address.ip))
        assert (kind, address.ip.packed in options) == (Kind.REPLY, True)


async def test_a_guest_reaches_its_gateway_and_the_host_reaches_the_guest(node6: Node) -> None:
    await node6.attach(A)
    async with node6.guest(A) as plain:
        guest = six(node6, A, plain)
        await guest.ping(GATEWAY)
        await guest.ping(ROUTER, via=GATEWAY)
        ping = await asyncio.create_subprocess_exec(
            *("ping", "-6", "-c", "1", "-W", "3", str(guest.address)),
            stdout=subprocess.DEVNULL,
        )
        plain.send(guest.advertisement(guest.address))
        await plain.receive(lambda f: f[20] == ICMP6 and f[54] in {128, 135})
        ping.kill()
        await ping.wait()


async def test_guests_reach_each_other_on_the_link(node6: Node) -> None:
    await node6.attach(A)
    await node6.attach(B)
    async with node6.guest(A) as one, node6.guest(B) as other:
        first, second = six(node6, A, one), six(node6, B, other)
        assert first.address != second.address
        await first.ping(GATEWAY)
        await second.ping(GATEWAY)  # now the kernel sends to both taps
        one.send(first.solicitation(second.address))
        asked = await other.receive(lambda f: f[54] == 135 and f[62:78] == second.address.packed)
        assert asked[6:12] == one.mac
        other.send(second.advertisement(second.address))
        told = await one.receive(lambda f: f[54] == 136 and f[62:78] == second.address.packed)
        assert told[6:12] == other.mac


def forbidden(guest: Guest6) -> dict[str, tuple[bytes, str]]:
    """Frames that must not leave the tap, with the rule that counts them."""
    everybody, mac = IPv6Address("ff02::1"), b"\x33\x33\0\0\0\1"
    other = IPv6Address("fd00:127::99")
    router = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + MARK
    redirect = struct.pack("!BBHI", 137, 0, 0, 0) + other.packed * 2 + MARK
    hidden = bytes((ICMP6, 0, 1, 4, 0, 0, 0, 0)) + router
    nothing = IPv6Address(0)
    return {
        "router advertisement": (
            guest.frame(mac, everybody, ICMP6, router, source=guest.link_local),
            "ra",
        ),
        "behind an extension": (guest.frame(mac, everybody, 60, hidden, inner=ICMP6), ""),
        "behind hop-by-hop": (guest.frame(mac, everybody, 0, hidden, inner=ICMP6), ""),
        "redirect": (guest.frame(mac, everybody, ICMP6, redirect), "redirect"),
        "advertises the gateway": (guest.advertisement(GATEWAY, more=MARK), "nd"),
        "advertises the router": (guest.advertisement(ROUTER, more=MARK), "nd"),
        "advertises from another": (
            guest.advertisement(guest.address, source=other, more=MARK),
            "nd",
        ),
        "checks another's address": (
            guest.solicitation(other, source=nothing, more=MARK),
            "address6",
        ),
        "foreign source": (guest.solicitation(GATEWAY, source=other, more=MARK), "address6"),
        "the router's source": (guest.solicitation(GATEWAY, source=ROUTER, more=MARK), "address6"),
        "DHCPv6 server": (guest.udp((547, 546), MARK), "dhcp6"),
        "DHCPv6 to others": (guest.udp((546, 547), MARK), ""),
    }


async def test_forbidden_frames_are_dropped_and_counted_and_own_ones_pass(node6: Node) -> None:
    await node6.attach(A)
    async with node6.guest(A) as plain:
        guest = six(node6, A, plain)
        await guest.ping(GATEWAY)
        with wire() as host:
            frames = forbidden(guest)
            passed = [name for name, (frame, _) in frames.items() if sent(plain, host, frame)]
            assert passed == []
            await _own_frames_pass(guest, host)
        links = node6.attachments._builder.links
        (attachment,) = node6.attachments.ready()
        (counted,) = (await in_thread(lambda: links.counters(attachment))).interfaces
        wanted = [rule for _, rule in frames.values() if rule]
        assert counted.refused == {rule: wanted.count(rule) for rule in wanted}


async def _own_frames_pass(guest: Guest6, host: Wire) -> None:
    nothing = IPv6Address(0)
    for frame in (
        guest.solicitation(guest.address, source=nothing, more=MARK),
        guest.solicitation(GATEWAY, more=MARK),
        guest.solicitation(GATEWAY, source=guest.link_local, more=MARK),
        guest.advertisement(guest.address, more=MARK),
        guest.advertisement(guest.link_local, source=guest.link_local, more=MARK),
    ):
        assert sent(guest.guest, host, frame)


@pytest.mark.parametrize("kind", ["nat", "isolated", "routed"])
async def test_networks_have_ipv6_of_their_kind(node: Node, kind: str) -> None:
    subnet = {"subnets6": {"n1": "fd00:9::/64"}} if kind == "routed" else {"subnet6": "fd00:9::/64"}
    ready = await node.attach(A, **target(kind, **subnet))
    (interface,) = ready.interfaces
    assert interface.gateway6 == ("" if kind == "isolated" else "fd00:9::1")
    assert FORWARDING.read_text().strip() == ("0" if kind == "isolated" else "1")
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert ("ip6 saddr fd00:9::/64" in rules.stdout) == (kind != "isolated")
    assert (rules.stdout.count("masquerade") == 2) == (kind == "nat")
    async with node.guest(A) as plain:
        guest = six(node, A, plain)
        if kind != "isolated":
            await guest.ping(IPv6Address("fd00:9::1"))
        kind6, options = await guest.ask(Kind.SOLICIT, ia())
        assert (kind6, guest.address.packed in options) == (Kind.ADVERTISE, True)


async def test_a_guest_without_ipv6_addresses_sends_no_ipv6(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as plain:
        guest = Guest6(plain, IPv6Address("fd00:127::5"))
        with wire() as host:
            assert not sent(plain, host, guest.solicitation(GATEWAY, more=MARK))


def syn(ports: tuple[int, int], flags: int = 2, acked: int = 0) -> bytes:
    return struct.pack("!HHIIBBHHH", *ports, 0, acked, 0x50, flags, 65535, 0, 0)


@contextlib.asynccontextmanager
async def serving(guest: Guest6, port: int) -> AsyncIterator[list[IPv6Address]]:
    """Answer neighbour solicitations, and each SYN to `port`; yield the source addresses."""
    seen: list[IPv6Address] = []

    async def serve() -> None:
        while True:
            frame = await guest.guest.receive(lambda f: f[12:14] == b"\x86\xdd", timeout_s=60)
            if frame[20] == ICMP6 and frame[54] == 135 and frame[62:78] == guest.address.packed:
                guest.guest.send(guest.advertisement(guest.address))
            if frame[20] == TCP and frame[56:58] == struct.pack("!H", port) and frame[67] == 2:
                seen.append(IPv6Address(frame[22:38]))
                acked = int.from_bytes(frame[58:62], "big") + 1 & 2**32 - 1
                answer = syn((port, int.from_bytes(frame[54:56], "big")), 0x12, acked)
                guest.guest.send(guest.frame(frame[6:12], seen[-1], TCP, answer))

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve())
        yield seen
        task.cancel()


@contextlib.contextmanager
def world6() -> Iterator[None]:
    """The world of IPv4, with IPv6 addresses for the host and for the outside."""
    with world():
        for namespace, address, link in ((), HOST6, "wan0"), (("-n", OUTER), FAR6, "eth0"):
            command = ["ip", *namespace, "addr", "add", f"{address}/64", "dev", link, "nodad"]
            subprocess.run(command, check=True)
        yield


async def test_a_published_port_answers_at_the_hosts_ipv6_addresses(node6: Node) -> None:
    with world6():
        every = {"host_port": 8080, "guest_port": 80}
        one = {"host_port": 8443, "guest_port": 80, "host_address": str(HOST6)}
        (interface,) = (await node6.attach(A, **published(every, one))).interfaces
        assert interface.published == (
            "0.0.0.0:8080->80/tcp",
            "[::]:8080->80/tcp",
            f"[{HOST6}]:8443->80/tcp",
        )
        await node6.attach(B)
        async with (
            node6.guest(A) as plain,
            node6.guest(B) as other,
            serving(six(node6, A, plain), 80) as seen,
        ):
            for port in (8080, 8443):
                assert await reached(str(HOST6), port)
                assert seen[-1] == FAR6
                assert await asyncio.to_thread(connects, str(HOST6), port)
            assert not await reached(str(HOST6), 8081)
            run(f"ip -n {OUTER} -6 route add {GATEWAY} via {HOST6}")
            assert not await reached(str(GATEWAY), 8080)
            assert not await reached("198.51.100.1", 8443)
            asks, count = six(node6, B, other), len(seen)
            gateway = await asks.resolve(GATEWAY)
            other.send(asks.frame(gateway, HOST6, TCP, syn((7, 8080))))
            with pytest.raises(TimeoutError):
                await other.receive(lambda f: f[20] == TCP, timeout_s=1)
            assert len(seen) == count  # a guest reaches no port of a host


async def test_an_ipv6_port_of_a_guest_without_ipv6_is_refused(node: Node) -> None:
    port = {"host_port": 80, "guest_port": 80, "host_address": "2001:db8::1"}
    with pytest.raises(VirtbusError, match=r"\[2001:db8::1\]:80/tcp .* set subnet6") as refused:
        await node.attach(A, **published(port))
    assert refused.value.reason == "no_ipv6"


async def test_settings_open_and_close_ipv6_networks_to_guests(node6: Node) -> None:
    networks = (IPv6Network("2001:db8::/64"),)
    hosts = frozenset({HOST6, FAR6})
    with world6():
        await node6.attach(A)
        async with node6.guest(A) as plain:
            guest = six(node6, A, plain)
            for reach, ends in (
                (ReachRules(hosts=hosts), ()),
                (ReachRules(closed=networks), ()),
                (ReachRules(), (FAR6,)),
                (ReachRules(hosts=hosts, opened=networks), (HOST6, FAR6)),
            ):  # an established echo stays open, so what is closed comes first
                node6.doors.attachers.bridges.set_reach(reach)
                for address in (HOST6, FAR6):
                    if address in ends:
                        await guest.ping(address, via=GATEWAY)
                    else:
                        with pytest.raises(TimeoutError):
                            await guest.ping(address, via=GATEWAY)


@pytest.mark.parametrize("kind", ["default", "nat", "routed", "overlay"])
async def test_a_guest_reaches_the_outside_by_ipv6(host: Host, kind: str) -> None:
    """Only a routed network has its guest's own address there; that of `default` is reached, too.

    Hosts may have routes to each other's built-in networks.
    """
    before = host.census()
    node = Node(host, subnet6=f"{GATEWAY}/64" if kind == "default" else "")
    await node.start()
    try:
        with world6(), outside(OUTER, "eth0") as packets:
            await node.attach(A, **_of_kind(kind))
            async with node.guest(A) as plain:
                guest = six(node, A, plain)
                own = guest.address if kind == "routed" else HOST6
                await _reaches_the_world(guest, packets, own)
                is_reached = await _is_reached(guest)
                assert is_reached == (kind in {"default", "routed"})
    finally:
        await node.end()
    await host.returns_to(before)


async def _reaches_the_world(guest: Guest6, packets: socket.socket, own: IPv6Address) -> None:
    network = IPv6Network(f"{guest.address}/64", strict=False)
    run(f"ip -n {OUTER} route add {network} via {HOST6}")
    await guest.ping(FAR6, via=network[1])
    asked = [frame for frame in received(packets) if frame[20] == ICMP6 and frame[54] == 128]
    assert {IPv6Address(frame[22:38]) for frame in asked} == {own}


async def _is_reached(guest: Guest6) -> bool:
    """Return True if an echo request from the outside comes to the guest."""
    ping = f"ip netns exec {OUTER} ping -6 -c 5 -i 0.2 -W 1 {guest.address}"
    process = await asyncio.create_subprocess_exec(*ping.split(), stdout=subprocess.DEVNULL)
    guest.guest.send(guest.advertisement(guest.address))
    try:
        await guest.guest.receive(lambda f: f[20] == ICMP6 and f[54] == 128, timeout_s=3)
    except TimeoutError:
        return False
    finally:
        await process.wait()
    return True


def _of_kind(kind: str) -> dict[str, Any]:
    match kind:
        case "default":
            return {}
        case "overlay":
            spec = overlay(subnet6="fd00:9::/64")
            spec["address_claims"]["net0"]["addresses"].append("fd00:9::5")
            return spec
        case "routed":
            return target(kind, subnets6={"n1": "fd00:9::/64"})
        case _:
            return target(kind, subnet6="fd00:9::/64")


def received(packets: socket.socket) -> list[bytes]:
    """Return the frames of IPv6 that a socket has received."""
    frames = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frames.append(packets.recv(2048))
    return [frame for frame in frames if frame[12:14] == b"\x86\xdd"]
