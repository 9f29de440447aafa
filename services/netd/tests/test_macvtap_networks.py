"""Networks of the kind `macvtap`: guests on the segment of an interface, with real frames."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

import pytest
from services.netd.tests.pretended_host import Host, Node
from services.netd.tests.segment import (
    FIRST,
    HOST,
    OUTSIDE,
    SERVER,
    Segment,
    lease,
    outside,
    ping_from_outside,
    run,
    sent,
)
from services.netd.tests.test_comparing import phase, running
from services.netd.tests.test_network_objects import A, B, cannot_ping, target
from services.netd.tests.test_path_check import look

from virtbus.netd.core.reach import ReachRules
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration

SECOND = IPv4Interface("192.0.2.11/24")


@pytest.fixture
def lan(host: Host) -> Iterator[Segment]:
    """An interface of the host, with a cable to the outside."""
    run(f"ip netns add {OUTSIDE}")
    try:
        run(f"ip link add lan0 type veth peer name lan1 netns {OUTSIDE}")
        run("ip link set lan0 up")
        run(f"ip -n {OUTSIDE} link set lan1 up")
        run(f"ip -n {OUTSIDE} addr add {SERVER}/24 dev lan1")
        with outside(OUTSIDE, "lan1") as packets:
            yield Segment(packets)
    finally:
        run(f"ip netns del {OUTSIDE}")


@pytest.fixture
async def nodes(lan_node: Node) -> Node:
    lan_node.links_allowed = lan_node.doors.attachers.segments._allowed = ("lan0", "gone")
    return lan_node


def network(**spec: Any) -> dict[str, Any]:
    return target("macvtap", link="lan0", **spec)


async def test_a_guest_is_on_the_segment_and_reaches_other_guests(
    nodes: Node, lan: Segment
) -> None:
    bound: dict[str, Any] = {"nics": ({"binding": "macvtap"},)}
    with pytest.raises(VirtbusError, match="no network of the kind macvtap"):
        await nodes.attach(A, **target("nat"), **bound)
    for uid in (A, B):
        await nodes.attach(uid, **network(), **bound)
    async with nodes.guest(A) as one, nodes.guest(B) as two:
        after = await lease(nodes, one, lan)
        assert after is not None
        assert after.interfaces[0].addresses == (str(FIRST),)
        await lease(nodes, two, lan, SECOND)
        await one.ping(SERVER)
        assert await ping_from_outside(one.ip)
        await one.ping(two.ip)
        await nodes.restart()
        await one.ping(two.ip)
        await two.ping(SERVER)


async def test_crafted_frames_are_dropped_and_counted(nodes: Node, lan: Segment) -> None:
    nodes.doors.bridge.reach = ReachRules(hosts=frozenset({HOST}))
    await nodes.attach(A, **network())
    async with nodes.guest(A) as guest:
        await lease(nodes, guest, lan)
        result = await sent(guest, lan)
        assert result.pop("passed") == []
        (nic,) = nodes.counters(A).interfaces
        assert nic.refused == {rule: len(names) for rule, names in result.items()}


async def test_guests_in_the_mode_private_do_not_reach_each_other(
    nodes: Node, lan: Segment
) -> None:
    for uid in (A, B):
        await nodes.attach(uid, **network(mode="private"))
    async with nodes.guest(A) as one, nodes.guest(B) as two:
        await lease(nodes, one, lan)
        await lease(nodes, two, lan, SECOND)
        await one.ping(SERVER)
        await cannot_ping(one, two.ip)


async def test_in_the_mode_passthru_one_guest_has_the_interface(nodes: Node, lan: Segment) -> None:
    await nodes.attach(A, **network(mode="passthru"))
    async with nodes.guest(A) as guest:
        await lease(nodes, guest, lan)
        await guest.ping(SERVER)
    for mode in ("passthru", "bridge"):
        with pytest.raises(VirtbusError, match="cannot have a further guest on lan0") as refused:
            await nodes.attach(B, **network(mode=mode))
        assert refused.value.reason == "link_in_use"


async def test_the_interface_stays_as_it_was_and_a_missing_one_is_refused(
    host: Host, nodes: Node
) -> None:
    before, shown = host.census(), run("ip -o link show lan0")
    await nodes.attach(A, **network())
    assert host.census()["links"] == before["links"]
    assert run("ip -o link show lan0") == shown
    with pytest.raises(VirtbusError, match="no link gone for networks of the kind macvtap"):
        await nodes.attach(B, **target("macvtap", link="gone"))
    (link,) = nodes.doors.attachers.segments.offered()
    assert (link.name, link.carries, link.mtu) == ("lan0", "macvtap", 1500)


async def test_a_link_that_was_lost_in_the_namespace_is_made_again(
    nodes: Node, lan: Segment
) -> None:
    await nodes.attach(A, **network())
    nodes.inside(A, "ip link del eth0")
    async with nodes.guest(A) as guest:
        await nodes.attachments.compare()
        await lease(nodes, guest, lan)
        await guest.ping(IPv4Address(SERVER))


async def test_a_guest_continues_while_the_interface_of_the_host_has_a_lower_mtu(
    nodes: Node, lan: Segment
) -> None:
    await nodes.attach(A, **network())
    async with running(nodes) as guest:
        await lease(nodes, guest, lan)
        run("ip link set lan0 mtu 1000")  # the kernel gives it to the guest's link, too
        (finding,) = await nodes.attachments.compare()
        assert (finding.error, finding.incomplete) == (None, True)
        assert "eth0 has the MTU 1000 instead of 1500" in finding.message
        for _restart in range(2):
            assert phase(nodes) is NetPhase.READY
            await guest.ping(SERVER)
            assert (await nodes.attach(A, **network())).phase is NetPhase.READY
            await nodes.restart()
        (fault,) = (await look(nodes)).faults or ()
        assert fault.next_step.startswith("set the MTU of the host's link again")
        run("ip link set lan0 mtu 1500")
        await nodes.attachments.compare()
        assert (await look(nodes)).faults == ()
        assert await nodes.attachments.compare() == []
