"""Security groups with real packets: the kernel tracks each guest's connections (ADR 0069)."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import ICMP6, Guest6
from services.netd.tests.pretended_host import Guest, Host, Node, checksum
from services.netd.tests.test_ipv6 import six
from services.netd.tests.test_network_objects import cannot_ping, target

from virtbus.netd.edge import group_filters
from virtbus.schemas.counters import Counters
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.subjects import node_group
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
C = "0192f0c1-2d3e-7abc-8def-00000000000c"
SYN, ACK, SYN_ACK, PUSH = 2, 16, 18, 24
WEB = {"app": "web"}
TO_80 = {"direction": "ingress", "protocol": "tcp", "ports": ["80"]}


async def put(node: Node, name: str, spec: dict[str, Any], **peers: list[str]) -> None:
    """Store a group of VMs with the label `app: web`, as the bus delivers it, and apply it."""
    group = validate(
        NodeGroup,
        {
            "uid": "0192f0c1-2d3e-7abc-8def-0000000000f1",
            "namespace": "default",
            "name": name,
            "spec": {"selector": {"labels": WEB}} | spec,
            "peers": {peer: {"default": addresses} for peer, addresses in peers.items()},
        },
    )
    node.groups.groups[node_group("n1", "default", name)] = group
    await apply(node)


async def apply(node: Node) -> None:
    for attachment in node.attachments.ready():
        await node.attachments.amend(attachment.uid, lambda vm: vm)


@asynccontextmanager
async def awake(node: Node, uid: str) -> AsyncIterator[Guest]:
    """A guest whose tap delivers: the kernel needs a moment after the tap was opened."""
    async with node.guest(uid) as guest:
        await guest.resolve(IPv4Address("10.127.0.1"))
        yield guest


def tcp(ports: tuple[int, int], flags: int, numbers: tuple[int, int] = (1, 0)) -> bytes:
    return struct.pack("!HHIIBBHHH", *ports, *numbers, 5 << 4, flags, 8192, 0, 0)


def segment_of(guest: Guest, other: Guest, ports: tuple[int, int], flags: int) -> bytes:
    """A TCP segment without data between two guests of one bridge."""
    bare = tcp(ports, flags, (1 if flags & SYN else 2, 0 if flags == SYN else 2))
    pseudo = guest.ip.packed + other.ip.packed + struct.pack("!HH", 6, len(bare))
    whole = bare[:16] + struct.pack("!H", checksum(pseudo + bare)) + bare[18:]
    return guest.ipv4(other.mac, other.ip, 6, whole)


async def passes(guest: Guest, other: Guest, ports: tuple[int, int], flags: int) -> bool:
    """Return True if a segment reaches the other guest."""
    guest.send(segment_of(guest, other, ports, flags))
    ends = struct.pack("!HH", *ports)
    try:
        await other.receive(
            lambda frame: frame[23] == 6 and frame[34:38] == ends and frame[47] == flags, 0.3
        )
    except TimeoutError:
        return False
    return True


async def opens(guest: Guest, other: Guest, port: int, own: int = 4000) -> bool:
    """Return True if a connection to a port of the other guest can be opened."""
    ports = own, port
    if not await passes(guest, other, ports, SYN):
        return False
    assert await passes(other, guest, (port, own), SYN_ACK)
    assert await passes(guest, other, ports, ACK)
    return True


def refused(node: Node, uid: str) -> dict[str, int]:
    counted: Counters = node.counters(uid)
    return counted.interfaces[0].refused


async def test_a_member_accepts_what_a_rule_allows_and_opens_what_it_likes(node: Node) -> None:
    await put(node, "web", {"rules": [TO_80]})
    await node.attach(A, labels=WEB)
    await node.attach(B)
    async with awake(node, A) as web, awake(node, B) as other:
        assert await opens(other, web, 80)
        assert not await opens(other, web, 81)
        await cannot_ping(other, web.ip)
        assert refused(node, A) == {"ingress": 2}
        # replies pass, and so does what the guest opens itself
        await web.ping(other.ip)
        assert await opens(web, other, 81, own=80)
        # a segment of no connection is none of the guest's own connections
        assert not await passes(other, web, (81, 5000), ACK)
        assert refused(node, A)["state"] == 1
        assert refused(node, B) == {}
        assert "virtbus_groups" not in node.inside(B, "nft list tables")


async def test_a_removed_rule_ends_the_connections_that_only_it_allowed(node: Node) -> None:
    to_81 = TO_80 | {"ports": ["81-90"]}
    await put(node, "web", {"rules": [TO_80, to_81]})
    await node.attach(A, labels=WEB)
    await node.attach(B)
    async with awake(node, A) as web, awake(node, B) as other:
        assert await opens(other, web, 80)
        assert await opens(other, web, 85)
        await put(node, "web", {"rules": [TO_80]})
        assert not await passes(other, web, (4000, 85), PUSH)
        assert not await passes(web, other, (85, 4000), PUSH)
        assert await passes(other, web, (4000, 80), PUSH)
        assert await passes(web, other, (80, 4000), PUSH)
        # without its last group, a VM is open, and nothing is left in its namespace
        node.groups.groups.clear()
        await apply(node)
        assert await opens(other, web, 85, own=4001)
        assert "virtbus_groups" not in node.inside(A, "nft list tables")


async def test_a_change_of_members_updates_a_set_and_no_rule(node: Node) -> None:
    by_lb = {"rules": [TO_80 | {"groups": ["lb"]}]}
    await put(node, "web", by_lb)
    await node.attach(A, labels=WEB)
    (address,) = (await node.attach(B)).interfaces[0].addresses
    lb = [address.partition("/")[0], "fd00:127::9"]
    async with awake(node, A) as web, awake(node, B) as other:
        assert not await opens(other, web, 80)
        assert refused(node, A) == {"ingress": 1}
        before = node.inside(A, "nft -a list chains inet")
        await put(node, "web", by_lb, lb=lb)
        assert node.inside(A, "nft -a list chains inet") == before
        assert refused(node, A) == {"ingress": 1}  # so it has counted on
        assert await opens(other, web, 80)
        await put(node, "web", by_lb, lb=["10.127.0.99"])
        assert not await passes(other, web, (4000, 80), PUSH)
        # what somebody removed is put back
        node.inside(A, "nft flush set inet virtbus_groups nic0-0-4")
        (finding,) = await node.attachments.compare()
        assert "members" in str(finding)
        assert await node.attachments.compare() == []
        node.inside(A, "nft delete table inet virtbus_groups")
        (finding,) = await node.attachments.compare()
        assert "rules" in str(finding)
        assert not await opens(other, web, 81)


async def test_rules_are_in_force_before_the_first_packet_and_after_a_restart(node: Node) -> None:
    await put(node, "web", {"rules": [TO_80], "isolates": ["ingress", "egress"]})
    await node.attach(A, labels=WEB)
    await node.attach(B)
    async with awake(node, A) as web, awake(node, B) as other:
        await cannot_ping(web, other.ip)
        assert refused(node, A) == {"egress": 1}
        assert await opens(other, web, 80)
        node.stop()
        await node.start()
        assert await passes(other, web, (4000, 80), PUSH)
        assert refused(node, A) == {"egress": 1}


async def test_membership_follows_the_labels_of_a_running_vm(node: Node) -> None:
    await put(node, "web", {"rules": [TO_80]})
    await node.attach(A)
    await node.attach(B)
    async with awake(node, A) as web, awake(node, B) as other:
        assert await opens(other, web, 81)
        assert hooks(node, A) == ["0", "0"]
        await node.attach(A, labels=WEB, generation=2)
        assert hooks(node, A) == ["1", "1"]
        assert not await opens(other, web, 81, own=4001)
        # a connection from before cannot pass as one that the guest opened
        assert not await passes(web, other, (81, 4000), PUSH)
        await node.attach(A, labels={}, generation=3)
        assert await opens(other, web, 81, own=4002)
        assert hooks(node, A) == ["0", "0"]


def hooks(node: Node, uid: str) -> list[str]:
    """Return 1 for each version of IP whose hooks the frames on the bridges of a VM pass."""
    settings = [f"/proc/sys/net/bridge/bridge-nf-call-{one}tables" for one in ("ip", "ip6")]
    return node.inside(uid, f"cat {' '.join(settings)}").split()


async def test_a_network_may_deny_what_no_rule_allows(node: Node) -> None:
    closed = target("isolated", default_deny=True)
    await node.attach(A, **closed)
    await node.attach(B, labels=WEB, **closed)
    async with node.guest(A) as one, node.guest(B) as web:
        await cannot_ping(web, one.ip)
        assert refused(node, B) == {"egress": 1}
        await put(node, "web", {"rules": [{"direction": "egress", "protocol": "icmp"}]})
        await cannot_ping(web, one.ip)  # the other end is closed, too
        assert refused(node, A) == {"ingress": 1}
        assert refused(node, B) == {}


async def test_frames_that_ip_rules_do_not_see_do_not_reach_a_member(node: Node) -> None:
    await put(node, "web", {"rules": [TO_80]})
    await node.attach(A, labels=WEB)
    async with awake(node, A) as web:
        gateway = await web.resolve(IPv4Address("10.127.0.1"))
        node.inside(
            A,
            "ip link add inject type veth peer name other && ip link set inject up "
            "&& ip link set other up master br0 && sleep 0.1",
        )
        try:
            send = (
                "import socket,sys; s=socket.socket(socket.AF_PACKET,socket.SOCK_RAW);"
                "s.bind(('inject',0)); s.send(bytes.fromhex(sys.argv[1]))"
            )
            packet = web.udp(web.mac, web.ip, (53, 53), b"mark", source=IPv4Address("10.127.0.1"))
            frame = packet[:6] + gateway + packet[12:]
            node.inside(A, f'python3 -c "{send}" {frame.hex()}')
            with pytest.raises(TimeoutError):
                await web.receive(lambda one: b"mark" in one, 0.3)
        finally:
            node.inside(A, "ip link del inject")
        rules = node.inside(A, "nft list table netdev virtbus_groups")
        assert 'hook ingress device "eth0" priority filter; policy drop' in rules


async def test_a_host_that_cannot_apply_rules_starts_no_member_and_closes_running_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridges = group_filters._OF_BRIDGES
    monkeypatch.setattr(group_filters, "_OF_BRIDGES", ("net/bridge/missing",))
    await node.attach(B, labels={})
    await node.attach(C, labels={})
    async with awake(node, B) as member, awake(node, C) as other:
        await put(node, "web", {"rules": [TO_80]})
        with pytest.raises(VirtbusError, match="modprobe br_netfilter"):
            await node.attach(A, labels=WEB)
        assert await opens(other, member, 80)
        for _attempt in range(2):
            with pytest.raises(VirtbusError, match="modprobe br_netfilter"):
                await node.attach(B, labels=WEB, generation=2)
        assert not await passes(other, member, (4000, 80), PUSH)
        assert not await passes(member, other, (80, 4000), PUSH)
        # a new netd adopts the network of the guest that runs, and it stays closed
        node.stop()
        await node.start()
        assert sorted(one.uid for one in node.attachments.ready()) == [B, C]
        assert not await passes(other, member, (4000, 80), PUSH)
        (finding,) = await node.attachments.compare()
        assert finding.reason == "network_incomplete"
        assert "cannot make them: eth0 closed" in finding.message
        # with the module, the rules are in force
        monkeypatch.setattr(group_filters, "_OF_BRIDGES", bridges)
        await apply(node)
        assert await opens(other, member, 80, own=4001)
        assert not await opens(other, member, 81, own=4002)
        monkeypatch.setattr(group_filters, "_OF_BRIDGES", ("net/bridge/missing",))
        (finding,) = await node.attachments.compare()
        assert "cannot make them: eth0 closed" in finding.message
        assert not await passes(other, member, (4001, 80), PUSH)
        await node.attach(B, labels={}, generation=3)
        assert await opens(other, member, 82, own=4003)
        assert await node.attachments.compare() == []


async def test_ipv6_has_the_same_rules(host: Host) -> None:
    node = Node(host, subnet6="fd00:127::1/64")
    await node.start()
    try:
        rules = [
            {"direction": "ingress", "protocol": "icmp", "groups": ["lb"]},
            {"direction": "ingress", "protocol": "udp", "ports": ["53"], "cidrs": ["fd00::/16"]},
        ]
        await put(node, "web", {"rules": rules})
        await node.attach(A, labels=WEB)
        await node.attach(B)
        async with awake(node, A) as web, awake(node, B) as other:
            to, of = six(node, A, web), six(node, B, other)
            other.send(of.solicitation(to.address))  # neighbour discovery is no connection
            await web.receive(lambda one: one[20] == ICMP6 and one[54] == 135)
            mac = web.mac
            passed = [await six_passes(of, to, mac, port) for port in (53, 54)]
            assert passed == [True, False]
            assert not await six_passes(of, to, mac, 0)
            await put(node, "web", {"rules": rules}, lb=[str(of.address)])
            assert await six_passes(of, to, mac, 0)
            await put(node, "web", {"rules": rules[:1]}, lb=[str(of.address)])
            assert not await six_passes(of, to, mac, 53)
            assert refused(node, A) == {"ingress": 1}
    finally:
        await node.end()


async def six_passes(of: Guest6, to: Guest6, mac: bytes, port: int) -> bool:
    """Return True if a datagram, or with port 0 an echo request, reaches the other guest."""
    content = struct.pack("!HHHH", 999, port, 12, 0) + b"mark"
    frame = of.frame(mac, to.address, 17, content)
    if port == 0:
        echo = struct.pack("!BBHHH", 128, 0, 0, 7, 1) + b"mark"
        frame = of.frame(mac, to.address, ICMP6, echo)
    of.guest.send(frame)
    try:
        await to.guest.receive(lambda one: b"mark" in one, 0.3)
    except TimeoutError:
        return False
    return True
