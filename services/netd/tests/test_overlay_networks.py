"""Networks of the kind `overlay`: a guest here, and guests of another host behind a tunnel."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Any
from unittest.mock import MagicMock

import pytest
from services.netd.tests.pretended_host import Host, Node, make_record
from services.netd.tests.segment import Segment, outside, run
from services.netd.tests.test_network_objects import NET, OTHER, A, B, cannot_ping, target

from virtbus.netd.attachments import Attachments
from virtbus.netd.core.names import network_bridge, tunnel
from virtbus.netd.core.overlay import remote_of
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.tunnels import Tunnels
from virtbus.netd.network_entry import NetworkEntry
from virtbus.netd.overlay_peers import OverlayPeers
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase
from virtbus.schemas.overlay import TUNNEL_PORT, OverlayMember, OverlayPeer

pytestmark = pytest.mark.integration

PEER = f"vbtest-peer-{os.getpid()}"
VNI = 4242
FAR, FAR_MAC = IPv4Address("10.200.0.99"), "02:00:00:00:00:99"
GATEWAY = IPv4Address("10.200.0.1")
OTHER_HOST, NO_HOST = IPv4Address("198.51.100.2"), IPv4Address("198.51.100.9")
DEVICE = tunnel(NET)


def overlay(
    uid: str = NET,
    name: str = "blue",
    vni: int = VNI,
    address: str = "10.200.0.5",
    **spec: Any,
) -> dict[str, Any]:
    found = target("overlay", uid, name, **{"subnet": "10.200.0.0/24", **spec})
    found["network_targets"][name]["vni"] = vni
    claim = {"network": uid, "addresses": [address]}
    return found | {"address_claims": {"net0": claim}}


def far(*members: OverlayMember, peer: str = "n2", address: str = "198.51.100.2") -> OverlayPeer:
    return OverlayPeer(node="n1", network=NET, peer=peer, address=address, members=members)


MEMBER = OverlayMember(mac=FAR_MAC, addresses=(str(FAR),))


@pytest.fixture
def underlay(host: Host) -> Iterator[Segment]:
    """Another host with a guest, and everything that this host sends to it."""
    run(f"ip netns add {PEER}")
    try:
        run(f"ip link add und0 type veth peer name und1 netns {PEER}")
        run("ip addr add 198.51.100.1/24 dev und0")
        run("ip link set und0 up")
        for address in (OTHER_HOST, NO_HOST):
            run(f"ip -n {PEER} addr add {address}/24 dev und1")
        run(f"ip -n {PEER} link set und1 up")
        run(f"ip -n {PEER} link set lo up")
        device = f"local 198.51.100.2 dstport {TUNNEL_PORT} nolearning"
        run(f"ip -n {PEER} link add vx address {FAR_MAC} type vxlan id {VNI} {device}")
        run(f"ip -n {PEER} addr add {FAR}/24 dev vx")
        run(f"ip -n {PEER} link set vx up")
        with outside(PEER, "und1") as packets:
            yield Segment(packets)
    finally:
        run(f"ip netns del {PEER}")
        subprocess.run(["ip", "link", "del", "und0"], check=False, capture_output=True)


@pytest.fixture
async def spanning(host: Host, underlay: Segment) -> AsyncIterator[Node]:
    before = host.census()
    made = Node(host)
    made.reach = ReachRules(hosts=frozenset({OTHER_HOST}))
    await made.start()
    made.doors.attachers.tunnels.complete = True
    try:
        yield made
    finally:
        for uid in list(made.attachments.resources()):
            await made.attachments.release(uid, 1_000)
        await made.attachments.tidy()
        made.stop()
    await host.returns_to(before)


async def joined(node: Node, uid: str = A, **spec: Any) -> str:
    """Attach a guest, and tell the other host of it; return its address."""
    ready = await node.attach(uid, **overlay(**spec))
    (nic,) = ready.interfaces
    address = nic.addresses[0].partition("/")[0]
    run(f"bridge -n {PEER} fdb append {nic.mac} dev vx dst 198.51.100.1")
    run(f"ip -n {PEER} neigh replace {address} lladdr {nic.mac} dev vx nud permanent")
    return address


def told(node: Node, *peers: OverlayPeer) -> None:
    """Write other peers into the tunnel, as the service does."""
    tunnels, nics = node.doors.attachers.tunnels, node.attachments.nics()
    tunnels._peers = {}
    for peer in peers:
        tunnels.set_peer(peer)
    node.doors.attachers.verify(nics, mend=True)


def sent_to_peer(underlay: Segment) -> int:
    """Return the number of tunnelled frames that came to the other host."""
    count, mark = 0, TUNNEL_PORT.to_bytes(2, "big")
    while True:
        try:
            frame = underlay.packets.recv(65536)
        except BlockingIOError:
            return count
        count += frame[12:14] == b"\x08\x00" and frame[36:38] == mark and frame[29] == 2


async def test_a_guest_reaches_guests_of_another_host_its_own_and_the_outside(
    spanning: Node, underlay: Segment
) -> None:
    address = await joined(spanning)
    await spanning.attach(B, **overlay(address="10.200.0.6"))
    told(spanning, far(MEMBER))
    async with spanning.guest(A) as guest, spanning.guest(B) as other:
        await guest.ping(FAR)
        await guest.ping(other.ip)
        await guest.ping(GATEWAY)
        await guest.ping(NO_HOST, via=GATEWAY)
        ping = f"ip netns exec {PEER} ping -c 1 -W 2 {address}"
        process = await asyncio.create_subprocess_exec(*ping.split(), stdout=subprocess.DEVNULL)
        assert await process.wait() == 0


async def test_the_tunnel_answers_arp_itself_and_floods_nothing(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    async with spanning.guest(A) as guest:
        await guest.ping(FAR)
        sent_to_peer(underlay)
        assert (await guest.resolve(FAR)).hex(":") == FAR_MAC
        await cannot_ping(guest, IPv4Address("10.200.0.55"))  # nobody has it
        unknown = bytes.fromhex("020000000055")
        for to in (b"\xff" * 6, unknown, bytes.fromhex("01005e000001")):
            guest.send(guest.udp(to, IPv4Address("10.200.0.55"), (1, 1), b"flood"))
        await guest.ping(FAR)
        assert sent_to_peer(underlay) == 1  # the second ping


async def test_a_peer_that_leaves_or_moves_is_followed(spanning: Node, underlay: Segment) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    async with spanning.guest(A) as guest:
        await guest.ping(FAR)
        told(spanning, far(MEMBER, peer="n3", address="198.51.100.3"))
        await cannot_ping(guest, FAR)
        assert "dst 198.51.100.3" in run(f"bridge fdb show dev {DEVICE}")
        told(spanning)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await guest.resolve(FAR)  # the old host answers no ARP
        assert FAR_MAC not in run(f"bridge fdb show dev {DEVICE}")


async def test_a_guest_that_two_hosts_list_is_where_its_key_was_written_last(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    former, now = far(MEMBER, peer="n3", address="198.51.100.3"), far(MEMBER)
    told(spanning, now, former, now)
    assert f"dst {OTHER_HOST}" in run(f"bridge fdb show dev {DEVICE}")
    told(spanning, former, now, former)
    assert "dst 198.51.100.3" in run(f"bridge fdb show dev {DEVICE}")


async def test_a_guest_that_ended_here_is_where_its_peers_list_it(spanning: Node) -> None:
    """A host that was cut off hears of a guest's move while it still has that guest."""
    await spanning.attach(A, **overlay())
    ready = await spanning.attach(B, **overlay(address="10.200.0.6"))
    mac = ready.interfaces[0].mac
    told(spanning, far(MEMBER, OverlayMember(mac=mac, addresses=("10.200.0.6",))))
    tunnelled = f"{mac} dst {OTHER_HOST}"
    assert tunnelled not in run(f"bridge fdb show dev {DEVICE}")
    await spanning.attachments.release(B, 1_000)
    await spanning.attachments.tidy()
    assert tunnelled in run(f"bridge fdb show dev {DEVICE}")
    assert f"10.200.0.6 lladdr {mac}" in run(f"ip neigh show dev {DEVICE}")


async def test_a_stranger_on_the_underlay_reaches_no_guest(
    spanning: Node, underlay: Segment
) -> None:
    address = await joined(spanning)
    told(spanning, far(MEMBER))
    bridges, ping = (
        spanning.doors.attachers.bridges,
        f"ip netns exec {PEER} ping -c 1 -W 1 {address}",
    )
    async with spanning.guest(A) as guest:
        known: tuple[set[IPv4Address], ...] = set(), {IPv4Address("198.51.100.3")}, {OTHER_HOST}
        for hosts in known:
            bridges.set_reach(ReachRules(hosts=frozenset(hosts)))
            process = await asyncio.create_subprocess_exec(*ping.split(), stdout=subprocess.DEVNULL)
            assert (await process.wait() == 0) == (OTHER_HOST in hosts), hosts
        await guest.ping(FAR)


async def test_a_guest_sends_no_frames_as_its_host_even_if_a_setting_opens_the_other_hosts(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    opened = (IPv4Network("198.51.100.0/24"),)
    reach = ReachRules(hosts=frozenset({OTHER_HOST}), opened=opened)
    spanning.doors.attachers.bridges.set_reach(reach)
    async with spanning.guest(A) as guest:
        gateway = await guest.resolve(GATEWAY)
        for port, data in ((TUNNEL_PORT, b"a frame"), (TUNNEL_PORT + 1, b"the end")):
            guest.send(guest.udp(gateway, OTHER_HOST, (TUNNEL_PORT, port), data))
        assert "a frame" not in await underlay.marks(b"the end")


async def test_a_device_that_an_interrupted_start_left_is_completed(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    run(f"ip link set {DEVICE} down")
    run(f"bridge link set dev {DEVICE} learning on flood on")
    assert spanning.doors.attachers.verify(spanning.attachments.nics()) == [
        f"{DEVICE}: gone or down"
    ]
    told(spanning, far(MEMBER))
    shown = run(f"bridge -d link show dev {DEVICE}")
    assert ("learning off" in shown, "flood off" in shown) == (True, True)
    async with spanning.guest(A) as guest:
        await guest.ping(FAR)


async def test_wrong_and_missing_entries_are_found_and_mended(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    attachers, nics = spanning.doors.attachers, spanning.attachments.nics()
    assert attachers.verify(nics) == []
    run(f"bridge fdb replace {FAR_MAC} dev {DEVICE} dst 198.51.100.66 self permanent")
    run(f"ip neigh del {FAR} dev {DEVICE}")
    run(f"bridge fdb add 02:00:00:00:00:77 dev {DEVICE} dst 198.51.100.2 self permanent")
    assert attachers.verify(nics) == [f"{DEVICE}: 3 entries are wrong or missing"]
    await spanning.attachments.replug()
    assert attachers.verify(nics) == []
    run(f"ip link del {DEVICE}")
    assert attachers.verify(nics) == [f"{DEVICE}: gone or down"]
    await spanning.attachments.replug()
    assert attachers.verify(nics) == []
    async with spanning.guest(A) as guest:
        await guest.ping(FAR)


async def test_a_netd_that_does_not_know_all_peers_yet_deletes_none(
    spanning: Node, underlay: Segment
) -> None:
    await joined(spanning)
    told(spanning, far(MEMBER))
    await spanning.restart()
    async with spanning.guest(A) as guest:
        await spanning.attachments.replug()
        await guest.ping(FAR)
        spanning.doors.attachers.tunnels.complete = True
        await spanning.attachments.replug()
        await cannot_ping(guest, FAR)


async def test_guests_have_the_mtu_of_the_underlay_without_the_tunnel(
    spanning: Node, underlay: Segment
) -> None:
    assert (await spanning.attach(A, **overlay())).interfaces[0].mtu == 1450
    with pytest.raises(VirtbusError, match="tunnels of this node carry 1450") as refused:
        await spanning.attach(
            B, **overlay(OTHER, "red", 7, "10.201.0.5", subnet="10.201.0.0/24", mtu=1500)
        )
    assert refused.value.reason == "mtu_too_large"
    assert [one.path for one in refused.value.body.details] == ["spec.networks[0].network"]


async def test_a_second_overlay_with_the_number_of_another_is_refused(
    spanning: Node, underlay: Segment
) -> None:
    await spanning.attach(A, **overlay())
    with pytest.raises(VirtbusError, match="another overlay has the number 4242") as refused:
        await spanning.attach(B, **overlay(OTHER, "red", VNI, "10.201.0.5", subnet="10.201.0.0/24"))
    assert refused.value.reason == "vni_taken"


async def test_an_overlay_ends_with_its_last_guest(spanning: Node, underlay: Segment) -> None:
    await spanning.attach(A, **overlay())
    await spanning.restart()
    await spanning.attachments.release(A, 1)
    await spanning.attachments.tidy()
    shown = run("ip -o link")
    assert (DEVICE in shown, network_bridge(NET) in shown) == (False, False)


async def test_a_host_without_an_underlay_takes_no_overlay(node: Node) -> None:
    with pytest.raises(VirtbusError) as refused:
        await node.attach(A, **overlay())
    assert refused.value.reason == "no_tunnels"


def test_a_guest_that_moves_here_is_here() -> None:
    moving = OverlayMember(mac="02:00:00:00:00:01", addresses=("10.200.0.7",))
    assert remote_of([far(MEMBER, moving)], {moving.mac}) == remote_of([far(MEMBER)])


async def test_a_network_that_fails_delays_no_other_and_is_tried_again() -> None:
    blue, red = overlay(), overlay(OTHER, "red", VNI + 1)
    ready = [plan_of(make_record(uid, **made)) for uid, made in ((A, blue), (B, red))]
    attachers, attachments = MagicMock(), MagicMock()
    attachments.ready.return_value = ready
    attachers.verify.side_effect = [OSError("no"), [], [], []]
    peers = OverlayPeers(attachers, attachments)
    assert not await peers._write()
    assert await peers._write()
    written = [nics[0].place for (nics,), _ in attachers.verify.call_args_list]
    assert written == [NET, OTHER, NET, OTHER]


def test_a_network_that_is_built_sends_no_other_guest_of_its_host_elsewhere() -> None:
    one, other = (plan_of(make_record(uid, **overlay())).nics[0] for uid in (A, B))
    tunnels = Tunnels(MagicMock())
    foreign = plan_of(make_record(B, **overlay(OTHER, "red", VNI + 1))).nics[0]
    tunnels.guests = lambda: [other, foreign]
    ((nic, own),) = tunnels.first_of_each([one])
    assert one.mac != other.mac
    assert (nic, own) == (one, {one.mac, other.mac})


async def test_networks_that_are_ready_or_being_built_are_of_this_host() -> None:
    doors = MagicMock()
    attachments = Attachments(doors, MagicMock())
    phases = {A: NetPhase.READY, B: NetPhase.BEGUN, NET: NetPhase.FAILED, OTHER: None}
    for uid, phase in phases.items():
        attachments._entries[uid] = NetworkEntry(plan_of(make_record(uid, **overlay())), phase)
    here = [attachments._entries[uid].attachment.nics[0] for uid in (A, B)]
    assert doors.attachers.tunnels.guests() == here
