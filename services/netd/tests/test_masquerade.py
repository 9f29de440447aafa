"""Guests behind NAT in their own namespace, with real frames: addresses, ports, what is closed."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_interface
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import Guest6, ia
from services.netd.tests.pretended_host import Guest, Host, Node, ping_from_host
from services.netd.tests.test_cni import bridge, conflist, without_bridge
from services.netd.tests.test_dhcp_server import answer_to
from services.netd.tests.test_hotplug import A, drop, plugs, step
from services.netd.tests.test_ipv6 import node6 as node6
from services.netd.tests.test_network_objects import cannot_ping, target
from services.netd.tests.test_network_path import world
from services.netd.tests.test_path_check import look
from services.netd.tests.test_published import reached, serving
from services.netd.tests.test_recovery import gone, killed_at
from services.netd.tests.test_security_groups import TO_80, WEB, put

from virtbus.netd.core.dhcp import MessageType
from virtbus.netd.core.dhcp6 import MessageType6
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.edge.taps import open_tap
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetReady

pytestmark = pytest.mark.integration

B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY, WORLD = IPv4Address("10.0.2.1"), IPv4Address("198.51.100.2")
OUTER_GATEWAY = IPv4Address("10.127.0.1")
GATEWAY6, GUEST6 = IPv6Address("fd10:0:2::1"), IPv6Address("fd10:0:2::2")
DECLARED: list[dict[str, Any]] = [
    {"port": 80},
    {"port": 53, "protocol": "udp"},
    {"port": 8000, "last_port": 8010, "protocol": "udp"},
]


def masked(*ports: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"nics": ({"binding": "masquerade", "ports": list(ports), **more},)}


def outer(ready: NetReady, version: int = 4, index: int = 0) -> str:
    found = (ip_interface(one).ip for one in ready.interfaces[index].addresses)
    return next(str(one) for one in found if one.version == version)


@contextmanager
def client(kind: int = socket.SOCK_DGRAM, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, kind) as made:
        made.settimeout(1)
        yield made


async def reaches(guest: Guest, address: str, port: int) -> bool:
    """Return True if a datagram of the host comes to the guest, and its answer back."""
    six = ":" in address
    at = 40 if six else 20
    with client(family=socket.AF_INET6 if six else socket.AF_INET) as sender:
        for _attempt in range(2):
            sender.sendto(b"hello", (address, port))
            try:
                frame = await guest.receive(
                    lambda f: (
                        f[14 + at + 2 : 14 + at + 4] == struct.pack("!H", port)
                        and f[14 + at + 8 : 14 + at + 13] == b"hello"
                    ),
                    0.4,
                )
            except TimeoutError:
                continue
            break
        else:
            return False
        ports = port, int.from_bytes(frame[14 + at : 14 + at + 2], "big")
        if six:
            udp = struct.pack("!HHHH", *ports, 13, 0) + b"again"
            asker = IPv6Address(frame[22:38])
            assert frame[38:54] == GUEST6.packed
            guest.send(Guest6(guest, GUEST6).frame(frame[6:12], asker, 17, udp))
        else:
            assert frame[30:34] == guest.ip.packed
            guest.send(guest.udp(frame[6:12], IPv4Address(frame[26:30]), ports, b"again"))
        data, whom = await asyncio.to_thread(sender.recvfrom, 100)
        assert (data, whom[:2]) == (b"again", (address, port))
        return True


async def test_a_guest_has_its_own_address_and_the_network_sees_that_of_the_namespace(
    node: Node,
) -> None:
    ready = await node.attach(A, **masked())
    (interface,) = ready.interfaces
    assert interface.binding == "masquerade"
    assert interface.guest_addresses == ("10.0.2.2/24",)
    assert outer(ready).startswith("10.127.")
    await node.attach(B)
    with world():
        async with node.guest(A) as guest, node.guest(B) as other:
            offer = await answer_to(guest, MessageType.DISCOVER)
            assert offer[16:20] == IPv4Address("10.0.2.2").packed
            assert b"\x03\x04" + GATEWAY.packed in offer, "the router"
            assert b"\x06\x04" + IPv4Address("192.0.2.53").packed in offer, "the name server"
            await guest.ping(GATEWAY)
            await guest.ping(WORLD, via=GATEWAY)
            await guest.ping(other.ip, via=GATEWAY)
            # another guest and the host see the address of the namespace only
            data = b"from the guest"
            guest.send(guest.udp(await guest.resolve(GATEWAY), other.ip, (4000, 9), data))
            frame = await other.receive(lambda f: data in f)
            assert str(IPv4Address(frame[26:30])) == outer(ready)
            assert frame[6:12] == guest.mac
            await ping_from_host(outer(ready))
            await other.ping(IPv4Address(outer(ready)))
            await cannot_ping(other, guest.ip, via=IPv4Address(outer(ready)))
            await cannot_ping(other, GATEWAY, via=IPv4Address(outer(ready)))


async def test_only_declared_ports_lead_to_the_guest_and_others_are_counted(node: Node) -> None:
    ready = await node.attach(A, **masked(*DECLARED))
    address = outer(ready)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        for port in (53, 8000, 8010):
            assert await reaches(guest, address, port), port
        assert node.counters(A).interfaces[0].refused.get("port", 0) == 0
        for port in (54, 80, 7999, 8011):
            assert not await reaches(guest, address, port), port
        with client(socket.SOCK_STREAM) as tcp:
            tcp.setblocking(False)
            tcp.connect_ex((address, 80))
            await guest.receive(lambda f: f[23] == 6 and f[36:38] == b"\0\x50")
        await ping_from_host(address)
        assert node.counters(A).interfaces[0].refused["port"] == 8


async def test_each_interface_counts_the_packets_to_its_own_closed_ports(node: Node) -> None:
    nics = masked(*DECLARED)["nics"] * 2
    ready = await node.attach(A, networks=("default", "default"), nics=nics)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        assert not await reaches(guest, outer(ready, index=0), 54)
        counted = [one.refused.get("port", 0) for one in node.counters(A).interfaces]
        assert counted == [2, 0]


async def test_without_declared_ports_all_lead_to_the_guest(node: Node) -> None:
    ready = await node.attach(A, **masked())
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        for port in (1, 53, 65_535):
            assert await reaches(guest, outer(ready), port)


async def test_ipv6_is_translated_by_the_same_rules(node6: Node) -> None:
    ready = await node6.attach(A, **masked(*DECLARED))
    assert ready.interfaces[0].guest_addresses == ("10.0.2.2/24", "fd10:0:2::2/120")
    address = outer(ready, 6)
    assert address.startswith("fd00:127::")
    async with node6.guest(A) as plain:
        guest = Guest6(plain, GUEST6)

        await guest.ping(GATEWAY6)
        await guest.ping(IPv6Address("fe80::1"))
        _kind, options = await guest.ask(MessageType6.SOLICIT, ia())
        assert GUEST6.packed in options
        await guest.ping(IPv6Address("fd00:127::1"), via=GATEWAY6)
        plain.send(guest.advertisement(GUEST6))
        assert await reaches(plain, address, 53)
        assert not await reaches(plain, address, 54)
        await node6.restart()
        assert await node6.attachments.compare() == []
        assert await reaches(plain, address, 53)
        # the link goes down and comes back: the kernel had removed addresses
        down = masked(*DECLARED, state="down")
        await node6.attach(A, generation=2, **down)
        assert not await reaches(plain, address, 53)
        await node6.attach(A, generation=3, **masked(*DECLARED))
        assert await node6.attachments.compare() == []
        await guest.ping(GATEWAY6)
        await guest.ping(IPv6Address("fe80::1"))
        assert await reaches(plain, address, 53)


async def test_connections_outlive_netd_and_what_somebody_removed_comes_back(node: Node) -> None:
    ready = await node.attach(A, **masked(*DECLARED))
    with world():
        async with node.guest(A) as guest:
            mac = await guest.resolve(GATEWAY)
            for broken in (
                "nft delete table inet virtbus_nat",
                "nft flush chain inet virtbus_nat input",
                f"ip addr del {ready.interfaces[0].addresses[0]} dev eth0",
                "ip addr del 10.0.2.1/24 dev br0",
                "ip route del default",
                "sysctl -qw net.ipv4.conf.br0.forwarding=0",
            ):
                node.inside(A, broken)
                (finding,) = await node.attachments.compare()
                assert str(finding), broken
                assert await node.attachments.compare() == [], broken
                await guest.ping(WORLD, via=GATEWAY)
                assert await reaches(guest, outer(ready), 53), broken
                assert not await reaches(guest, outer(ready), 54), broken
            before = node.inside(A, "nft -a list ruleset")
            await node.restart()
            await node.attach(A, **masked(*DECLARED))
            assert node.inside(A, "nft -a list ruleset") == before, "nothing was replaced"
            assert mac == await guest.resolve(GATEWAY)
            await guest.ping(WORLD, via=GATEWAY)


async def test_spoofing_and_the_hosts_of_the_fleet_stay_closed(node: Node) -> None:
    await node.attach(A, **masked())
    async with node.guest(A) as guest:
        mac = await guest.resolve(GATEWAY)
        for source in (IPv4Address("10.0.2.3"), OUTER_GATEWAY):
            guest.send(guest.udp(mac, WORLD, (1, 2), b"x", source=source))
        guest.send(guest.arp(2, b"\xff" * 6, GATEWAY, sender=(guest.mac, GATEWAY)))
        await guest.ping(GATEWAY)
        counted = node.counters(A).interfaces[0].refused
        assert (counted["address"], counted["arp"]) == (2, 1)
        # no address of the host except the gateway of the network, and none of the namespace
        await guest.ping(OUTER_GATEWAY, via=GATEWAY)
        await cannot_ping(guest, IPv4Address("127.0.0.1"), via=GATEWAY)


async def test_security_groups_apply_to_the_translated_connections(node: Node) -> None:
    udp = {"direction": "ingress", "protocol": "udp", "ports": ["53"], "cidrs": ["10.127.0.0/16"]}
    to_world = {"direction": "egress", "cidrs": [f"{WORLD}/32"]}
    await put(node, "web", {"rules": [udp, TO_80, to_world]})
    ready = await node.attach(A, labels=WEB, **masked())
    with world():
        async with node.guest(A) as guest:
            await guest.ping(WORLD, via=GATEWAY)
            await cannot_ping(guest, OUTER_GATEWAY, via=GATEWAY)
            assert node.counters(A).interfaces[0].refused == {"egress": 1}
            assert await reaches(guest, outer(ready), 53)
            assert not await reaches(guest, outer(ready), 54)
            assert node.counters(A).interfaces[0].refused == {"egress": 1, "ingress": 2}
            await node.restart()
            await put(node, "web", {"rules": [TO_80]})
            assert not await reaches(guest, outer(ready), 53)
            await guest.ping(WORLD, via=GATEWAY)


async def test_another_interface_of_the_vm_is_no_way_into_its_namespace(node: Node) -> None:
    two = {"networks": ("default", "default"), "nics": (masked()["nics"][0], {})}
    ready = await node.attach(A, **two)
    assert [one.binding for one in ready.interfaces] == ["masquerade", ""]
    async with node.guest(A, 1) as plain:
        await plain.ping(OUTER_GATEWAY)
        (_name, _state, mac, *_) = node.inside(A, "ip -br link show br1").split()
        inner = mac_bytes(mac)
        for address in (GATEWAY, IPv4Address(outer(ready)), OUTER_GATEWAY):
            icmp = struct.pack("!BBHHH", 8, 0, 0xF7FF - 7, 7, 0)
            plain.send(plain.ipv4(inner, address, 1, icmp))
            with pytest.raises(TimeoutError):
                await plain.receive(lambda f: f[23] == 1 and f[34] == 0, 0.3)


async def test_the_guests_network_can_be_chosen_and_must_not_be_that_of_its_network(
    node: Node,
) -> None:
    ready = await node.attach(A, **masked(vm_network_cidr="10.11.12.0/30"))
    assert ready.interfaces[0].guest_addresses == ("10.11.12.2/30",)
    async with node.guest(A) as guest:
        await guest.ping(IPv4Address("10.11.12.1"))
        assert await reaches(guest, outer(ready), 53)
    with pytest.raises(VirtbusError) as error:
        await node.attach(B, **masked(vm_network_cidr="10.127.4.0/24"))
    assert error.value.reason == "guest_network_taken"
    (detail,) = error.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].vm_network_cidr"


@pytest.mark.parametrize("kind", ["bridge", "isolated"])
async def test_networks_that_give_the_namespace_no_address_or_gateway_are_refused(
    node: Node, kind: str
) -> None:
    spec = {"link": "br-lan"} if kind == "bridge" else {}
    with pytest.raises(VirtbusError) as error:
        await node.attach(A, **target(kind, **spec), **masked())
    (detail,) = error.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].binding"
    assert "write bridge" in detail.message


@pytest.mark.parametrize("kind", ["nat", "routed"])
async def test_network_objects_have_it_too(node: Node, kind: str) -> None:
    ready = await node.attach(A, **target(kind), **masked(*DECLARED))
    async with node.guest(A) as guest:
        await guest.ping(IPv4Address("10.200.0.1"), via=GATEWAY)
        assert await reaches(guest, outer(ready), 53)
        assert not await reaches(guest, outer(ready), 54)


async def test_an_interface_behind_nat_is_plugged_and_unplugged(node: Node) -> None:
    first = await node.attach(A)
    two = {"networks": ("default", "default"), "nics": ({}, masked(*DECLARED)["nics"][0])}
    async with node.guest(A) as cold:
        ready = await node.attach(A, generation=2, **two)
        fd = open_tap((await step(node, "lend")).tap)
        await step(node, "join")
        ready = await node.attach(A, generation=2, **two)
        assert plugs(ready) == {"net0": "plugged", "net1": "plugged"}
        hot = Guest(fd, ready.interfaces[1].mac, "10.0.2.2/24")
        await hot.ping(GATEWAY)
        assert await reaches(hot, outer(ready, index=1), 53)
        assert not await reaches(hot, outer(ready, index=1), 54)
        await node.restart()
        assert await node.attachments.compare() == []
        hot.close()
        after = await drop(node, 3)
        assert after.interfaces == first.interfaces
        assert "virtbus_nat" not in node.inside(A, "nft list tables")
        assert await node.attachments.compare() == []
        await cold.ping(OUTER_GATEWAY)


async def test_a_network_of_plugins_is_behind_the_namespace_too(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    try:
        ready = await node.attach(A, networks=("lan",), **masked(*DECLARED))
        assert ready.interfaces[0].guest_addresses == ("10.0.2.2/24",)
        async with node.guest(A) as guest:
            await guest.ping(IPv4Address("10.88.0.1"), via=GATEWAY)
            assert await reaches(guest, outer(ready), 53)
            assert not await reaches(guest, outer(ready), 54)
            await node.restart()
            assert await node.attachments.compare() == []
            assert await reaches(guest, outer(ready), 53)
        assert "via 10.88.0.9" in node.inside(A, "ip route show 192.0.2.0/24")
        await node.attachments.release(A, 1)
        assert list((node.host.tmp / "ipam" / "lan").glob("10.88.*")) == []
    finally:
        without_bridge()


async def test_a_published_port_of_the_host_leads_through_the_namespace(node: Node) -> None:
    web = {"publish": [{"host_port": 8080, "guest_port": 80}]}
    with world():
        await node.attach(A, **masked(*DECLARED, **web))
        async with node.guest(A) as guest, serving(guest, 80) as seen:
            assert await reached("198.51.100.1", 8080)
            assert seen[-1] == WORLD.packed


async def test_the_description_names_addresses_and_ports_and_a_check_finds_what_is_broken(
    node: Node,
) -> None:
    await node.attach(A, **masked(*DECLARED))
    (path,) = (await look(node, check=False)).interfaces
    assert path.ports == ("80/tcp", "53/udp", "8000-8010/udp")
    assert path.status.guest_addresses == ("10.0.2.2/24",)
    assert (await look(node)).faults == ()
    node.inside(A, "ip route del default; nft delete table inet virtbus_nat")
    faults = [one.what for one in (await look(node)).faults or ()]
    assert faults == ["eth0 lacks the route to 0.0.0.0/0", "the rules of its NAT are gone or wrong"]


def test_after_a_kill_at_any_step_the_next_attach_works_and_release_leaves_nothing(
    host: Host,
) -> None:
    census = host.census()

    async def attach() -> None:
        node = Node(host)
        await node.start()
        await node.attach(A, **masked(*DECLARED))
        node.stop()

    async def works() -> None:
        node = Node(host)
        await node.start()
        ready = await node.attach(A, **masked(*DECLARED))
        async with node.guest(A) as guest:
            await guest.ping(GATEWAY)
            assert await reaches(guest, outer(ready), 53)
            assert not await reaches(guest, outer(ready), 54)
        node.stop()

    at = 1
    while killed_at(at, attach):
        asyncio.run(works())
        asyncio.run(gone(host, census=census))
        at += 7
    assert at > 100
    asyncio.run(gone(host, census=census))
