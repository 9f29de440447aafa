"""Networks of the kind `bridge`: guests on the segment of an existing bridge, with real frames."""

import subprocess
import time
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

import pytest
from services.netd.tests.pretended_host import Host, Node, make_record
from services.netd.tests.segment import (
    BRIDGE,
    BROADCAST,
    FIRST,
    HOST,
    SERVER,
    Segment,
    lease,
    ping_from_outside,
    run,
    sent,
    wanted,
)
from services.netd.tests.test_network_objects import A, B, target

from virtbus.netd.core.bridge_ports import PORTS_MAX, nearly_full, refuse_full
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.bridge_attacher import vlan_calls
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration


def lan_network(**spec: Any) -> dict[str, Any]:
    return target("bridge", link=BRIDGE, **spec)


async def test_a_guest_has_the_address_that_the_segment_gives_it(
    lan_node: Node, lan: Segment
) -> None:
    ready = await lan_node.attach(A, **lan_network())
    assert (ready.phase, ready.interfaces[0].addresses) == (NetPhase.READY, ())
    async with lan_node.guest(A) as guest:
        after = await lease(lan_node, guest, lan)
        assert after is not None
        assert after.interfaces[0].addresses == (str(FIRST),)
        assert after.interfaces[0].gateway == str(SERVER)
        await guest.ping(SERVER)
        assert await ping_from_outside(guest.ip)
        # the next lease replaces the first
        other = IPv4Interface("192.0.2.11/24")
        await lease(lan_node, guest, lan, other)
        await guest.ping(SERVER)
        guest.ip = FIRST.ip
        guest.send(guest.udp(BROADCAST, SERVER, (1, 1), b"the-former"))
        guest.ip = other.ip
        guest.send(guest.udp(BROADCAST, SERVER, (1, 1), b"the-end"))
        assert "the-former" not in await lan.marks(b"the-end")


async def test_two_guests_of_a_bridge_reach_each_other(lan_node: Node, lan: Segment) -> None:
    for uid in (A, B):
        await lan_node.attach(uid, **lan_network())
    async with lan_node.guest(A) as one, lan_node.guest(B) as two:
        await lease(lan_node, one, lan)
        await lease(lan_node, two, lan, IPv4Interface("192.0.2.11/24"))
        await one.ping(two.ip)
        await two.ping(one.ip)


async def test_crafted_frames_are_dropped_and_counted_by_rule(lan_node: Node, lan: Segment) -> None:
    lan_node.doors.bridge.reach = ReachRules(hosts=frozenset({HOST}))
    await lan_node.attach(A, **lan_network())
    async with lan_node.guest(A) as guest:
        guest.send(guest.udp(BROADCAST, SERVER, (1, 1), b"early", source=FIRST.ip))
        await lease(lan_node, guest, lan)
        result = await sent(guest, lan)
        assert result.pop("passed") == []
        (nic,) = lan_node.counters(A).interfaces
        assert nic.refused == {rule: len(names) for rule, names in result.items()}


FLOOD = 2000


async def test_a_flood_of_dhcp_requests_is_limited_and_counted(
    lan_node: Node, lan: Segment
) -> None:
    for uid in (A, B):
        await lan_node.attach(uid, **lan_network())
    async with lan_node.guest(A) as one, lan_node.guest(B) as other:
        await lease(lan_node, other, lan, IPv4Interface("192.0.2.11/24"))
        await other.ping(SERVER)
        began_s = time.monotonic()
        for _ in range(FLOOD):
            one.send(wanted(one, FIRST))
        await other.ping(SERVER)
        other.send(other.udp(BROADCAST, SERVER, (1000, 1000), b"the-end"))
        asked = (await lan.marks(b"the-end")).count("\x63\x82\x53\x63")
        assert asked <= 20 + 20 * (time.monotonic() - began_s) + 1
        refused = [lan_node.counters(uid).interfaces[0].refused for uid in (A, B)]
        assert refused == [{"dhcp_flood": FLOOD - asked}, {}]
        await lease(lan_node, one, lan)
        await one.ping(SERVER)


async def test_a_guest_gives_itself_no_lease(lan_node: Node, lan: Segment) -> None:
    await lan_node.attach(A, **lan_network())
    async with lan_node.guest(A) as guest:
        ack = bytearray(wanted(guest, FIRST)[42:])
        ack[0], ack[16:20], ack[242] = 2, FIRST.ip.packed, 5
        guest.send(guest.udp(BROADCAST, IPv4Address("255.255.255.255"), (67, 68), bytes(ack)))
        await lease(lan_node, guest, lan, IPv4Interface("192.0.2.11/24"))
        assert lan_node.attachments.ready()[0].nics[0].addresses == ("192.0.2.11/24",)


async def test_a_lease_of_a_hosts_address_is_refused(lan_node: Node, lan: Segment) -> None:
    lan_node.doors.bridge.reach = ReachRules(hosts=frozenset({FIRST.ip}))
    await lan_node.attach(A, **lan_network())
    async with lan_node.guest(A) as guest:
        with pytest.raises(VirtbusError, match="which is the address of a host"):
            await lease(lan_node, guest, lan)


async def test_the_reach_rules_follow_the_fleet_and_a_restart_keeps_the_lease(
    lan_node: Node, lan: Segment
) -> None:
    await lan_node.attach(A, **lan_network())
    async with lan_node.guest(A) as guest:
        await lease(lan_node, guest, lan)
        guest.send(guest.udp(BROADCAST, HOST, (1, 22), b"the-end"))
        await lan.marks(b"the-end")
        lan_node.doors.bridge.reach = ReachRules(hosts=frozenset({HOST}))
        await lan_node.attachments.amend(A, lambda vm: vm)
        guest.send(guest.udp(BROADCAST, HOST, (1, 22), b"to-a-host"))
        guest.send(guest.udp(BROADCAST, SERVER, (1, 22), b"an-end"))
        assert "to-a-host" not in await lan.marks(b"an-end")
        await lan_node.restart()
        assert lan_node.attachments.ready()[0].nics[0].addresses == (str(FIRST),)
        await guest.ping(SERVER)


async def test_a_host_is_closed_by_every_address_of_its_bridges(
    lan_node: Node, lan: Segment
) -> None:
    run(f"ip addr add {HOST}/24 dev {BRIDGE}")
    await lan_node.attach(B)
    await lan_node.attach(A, **lan_network())
    async with lan_node.guest(A) as guest:
        await lease(lan_node, guest, lan)
        with pytest.raises(TimeoutError):  # the host takes no packet for it from another link
            await guest.ping(IPv4Address("10.127.0.1"), via=HOST)


async def test_the_bridge_stays_as_the_host_made_it(lan_node: Node, lan: Segment) -> None:
    shown = run(f"ip -o link show {BRIDGE}").split("qlen")
    ready = await lan_node.attach(A, **lan_network())
    assert run(f"ip -o link show {BRIDGE}").split("qlen") == shown
    assert ready.interfaces[0].mtu == 1500
    await lan_node.attachments.release(A, 1)
    await lan_node.attachments.tidy()
    assert run(f"ip -o link show {BRIDGE}").split("qlen") == shown


async def test_guests_have_the_mtu_of_the_bridge_at_most(lan_node: Node, lan: Segment) -> None:
    run("ip link set lan0 mtu 1400")
    assert (await lan_node.attach(A, **lan_network())).interfaces[0].mtu == 1400
    with pytest.raises(
        VirtbusError, match="has an MTU of 1500, and its link on this node has 1400"
    ) as refused:
        await lan_node.attach(B, **lan_network(mtu=1500))
    assert [one.path for one in refused.value.body.details] == ["spec.networks[0].network"]
    assert "mtu 1400" in run(f"ip link show {BRIDGE}")


async def test_a_lost_port_is_plugged_again_and_an_isolated_one_opened(
    lan_node: Node, lan: Segment
) -> None:
    await lan_node.attach(A, **lan_network())
    (nic,) = lan_node.attachments.ready()[0].nics
    run(f"ip link set {nic.host_link} nomaster")
    assert lan_node.doors.attachers.verify([nic]) == [f"{nic.host_link}: not on {BRIDGE}"]
    await lan_node.attachments.replug()
    assert lan_node.doors.attachers.verify([nic]) == []
    run(f"ip link set {nic.host_link} type bridge_slave isolated on")
    assert lan_node.doors.attachers.verify([nic]) == [f"{nic.host_link}: an isolated port"]
    await lan_node.attachments.replug()
    assert lan_node.doors.attachers.verify([nic]) == []
    async with lan_node.guest(A) as guest:
        await lease(lan_node, guest, lan)
        await guest.ping(SERVER)


async def test_a_bridge_that_is_missing_or_not_allowed_is_refused_before_anything_is_made(
    host: Host, lan_node: Node
) -> None:
    before = host.census()
    subprocess.run(["ip", "link", "add", "dev", "own", "type", "bridge"], check=True)
    lan_node.doors.attachers.segments._allowed = ("own", "gone", "lan0", BRIDGE)
    refusals = {
        "other": ("link_forbidden", "its operator adds it to netd's setting links_allowed"),
        "gone": ("link_missing", "no link gone for networks of the kind bridge; make it"),
        "lan0": ("link_missing", "no link lan0"),
    }
    for link, (reason, text) in refusals.items():
        with pytest.raises(VirtbusError, match=text) as refused:
            await lan_node.attach(A, **target("bridge", link=link))
        assert refused.value.reason == reason
        assert refused.value.body.details[0].path == "spec.networks[0].network"
    run("ip link del own")
    assert host.census() == before


async def test_a_vlan_on_a_kernel_without_vlans_is_refused(host: Host, lan_node: Node) -> None:
    before = host.census()
    with pytest.raises(VirtbusError) as refused:
        await lan_node.attach(A, **lan_network(vlan=7))
    # a kernel with VLANs refuses it as well, because this bridge does not separate them
    assert refused.value.reason == "no_vlans"
    assert host.census() == before


def test_a_port_is_moved_to_its_vlan_by_two_recorded_calls() -> None:
    add, delete = vlan_calls(5, 7, 1)
    head = bytes.fromhex("0700 0000 05000000 00000000 00000000".replace(" ", ""))
    assert (add.type, add.body) == (19, head + bytes.fromhex("0c001a00 08000200 06000700"))
    assert (delete.type, delete.body) == (17, head + bytes.fromhex("0c001a00 08000200 00000100"))
    assert vlan_calls(5, 7, 0) == [add] == vlan_calls(5, 7, 7)


def test_a_full_bridge_is_said_before_it_is_met() -> None:
    (nic,) = plan_of(make_record(A, **lan_network())).nics
    assert nearly_full([nic] * 900) == ""
    assert nearly_full([nic] * 950) == (
        "the bridge of the network blue has 950 of 1023 ports in use"
    )
    refuse_full(nic, PORTS_MAX - 1)
    with pytest.raises(VirtbusError, match="has its 1023 ports") as refused:
        refuse_full(nic, PORTS_MAX)
    assert refused.value.reason == "bridge_full"
    assert [one.path for one in refused.value.body.details] == ["spec.networks[0].network"]
