"""netd's audit report of the host's network: strays, missing objects, and repairs."""

import subprocess
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import Node, eventually
from services.netd.tests.test_cni import bridge, conflist, without_bridge

from virtbus.netd.core.names import host_link, netns
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.orphan_audit import HOST, OrphanAudit

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"


def leftovers(node: Node) -> OrphanAudit:
    return OrphanAudit(node.doors, node.attachments)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


async def test_a_whole_host_has_neither_strays_nor_faults(node: Node) -> None:
    assert await leftovers(node).faults() == {}
    await node.attach(A)
    async with node.guest(A):
        assert await leftovers(node).strays() == {}
        assert await leftovers(node).faults() == {}


async def test_a_network_whose_state_was_lost_is_found_and_removed(node: Node) -> None:
    await node.attach(A)
    await node.attach(B)
    node.doors.files.remove(A)
    node.attachments._entries.pop(A)
    found = await leftovers(node).strays()
    assert found == {A: [f"netns {netns(A)}", f"link {host_link(A, 0)}"]}
    assert await leftovers(node).remove(A)
    await eventually(lambda: not Path("/sys/class/net", host_link(A, 0)).exists())
    assert await leftovers(node).strays() == {}
    assert not await leftovers(node).remove(A)
    assert await leftovers(node).faults() == {}
    assert list(await leftovers(node).held()) == [B]


@pytest.mark.parametrize("network", ["default", "lan"], ids=["built-in", "cni"])
async def test_a_namespace_is_known_by_its_mark_after_a_restart(node: Node, network: str) -> None:
    conflist(node, "lan", bridge(node))
    try:
        await node.attach(A, networks=(network,))
        node.doors.files.remove(A)
        await node.restart()
        assert await leftovers(node).strays() == {A: [f"netns {netns(A)}"]}
        assert await leftovers(node).remove(A)
        assert not node.host.namespaces.exists(netns(A))
    finally:
        without_bridge()


async def test_objects_of_another_instance_or_nobody_are_no_strays(node: Node) -> None:
    other = Node(node.host, "10.128.0.1/16", bridge="virtbus1", state="other")
    await other.start()
    try:
        await other.attach(B)
        await in_thread(lambda: node.host.namespaces.make_and_enter(netns(A)))
        assert await leftovers(node).strays() == {}
        assert not await leftovers(node).remove(B)
        assert not await leftovers(node).remove(A)
        assert await leftovers(node).faults() == {}
        assert await leftovers(other).faults() == {}
        assert node.host.namespaces.exists(netns(A))
    finally:
        node.host.namespaces.remove(netns(A))
        for uid in list(other.attachments.resources()):
            await other.attachments.release(uid, 1_000)
        await other.attachments.tidy()
        other.stop()


@pytest.mark.parametrize(
    ("blow", "uid", "said"),
    [
        ("nft delete table inet virtbus", HOST, "nftables virtbus: gone"),
        ("sysctl -qw net.ipv4.ip_forward=0", HOST, "ip_forward: off"),
        (f"ip link set {host_link(A, 0)} nomaster", A, f"{host_link(A, 0)}: not on virtbus0"),
        ("ip link delete virtbus0", HOST, "bridge virtbus0: gone"),
    ],
)
async def test_parts_removed_by_others_are_reported_and_made_again(
    node: Node, blow: str, uid: str, said: str
) -> None:
    await node.attach(A)
    run(blow)
    assert said in (await leftovers(node).faults())[uid]
    await leftovers(node).mend()
    assert await leftovers(node).faults() == {}


async def test_missing_parts_inside_a_namespace_are_reported_and_made_again(node: Node) -> None:
    await node.attach(A)
    node.inside(A, "ip link set tap0 nomaster; nft flush ruleset")
    faults = (await leftovers(node).faults())[A]
    assert "tap0 is not on br0" in faults
    await leftovers(node).mend()
    assert await leftovers(node).faults() == {}


async def test_an_unneeded_host_side_is_reported_and_removed(node: Node) -> None:
    await node.attach(A)
    await node.attachments.release(A, 1)
    assert await leftovers(node).faults() == {}, "netd is about to remove it"
    node.attachments.untidy.clear()
    assert (await leftovers(node).faults())[HOST] == (
        "bridge virtbus0: no VM needs it",
        "nftables virtbus: no VM needs it",
    )
    await leftovers(node).mend()
    assert await leftovers(node).faults() == {}
    assert not Path("/sys/class/net/virtbus0").exists()


async def test_the_bridge_of_earlier_settings_is_reported_and_removed(node: Node) -> None:
    await node.attach(A)
    node.stop()
    renamed = Node(node.host, bridge="virtbus7")
    run("ip address flush dev virtbus0")
    await renamed.start()
    try:
        faults = await leftovers(renamed).faults()
        assert "bridge virtbus0: of earlier settings" in faults[HOST]
        await leftovers(renamed).mend()
        assert await leftovers(renamed).faults() == {}
        assert not Path("/sys/class/net/virtbus0").exists()
        listed = subprocess.run(
            ["nft", "list", "tables"], check=True, capture_output=True, text=True
        )
        assert "table inet virtbus\n" not in listed.stdout
    finally:
        await renamed.attachments.release(A, 1_000)
        await renamed.attachments.tidy()
        renamed.stop()
        node.attachments._entries.clear()
