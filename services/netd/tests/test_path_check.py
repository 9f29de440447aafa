"""The description of a VM's network, and what a check of it finds."""

import subprocess

import pytest
from services.netd.tests.pretended_host import Node

from virtbus.netd.core.names import host_link
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.path_check import PathCheck
from virtbus.schemas.network_path import NetworkAsk, NetworkView

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
TWO = ("default", "default")


async def look(node: Node, *, check: bool = True) -> NetworkView:
    audit = OrphanAudit(node.doors, node.attachments)
    paths = PathCheck(node.doors, node.attachments, audit)
    return await paths.view(NetworkAsk(uid=A, check=check))


async def test_the_path_names_each_link_from_the_guest_outwards(node: Node) -> None:
    assert (await look(node, check=False)).state == "none"
    slow = {"limits": {"inbound": {"bytes_per_s": 1000}}}
    await node.attach(A, nics=(slow,))
    view = await look(node, check=False)
    (path,) = view.interfaces
    inside = path.status.tap, path.bridge, path.link, path.host_link, path.host_bridge
    assert inside == ("tap0", "br0", "eth0", host_link(A, 0), "virtbus0")
    assert path.limits == {"to guest": 1000}
    assert (view.state, view.gateway, view.subnet) == ("ready", "10.127.0.1", "10.127.0.0/16")
    assert view.faults is None
    assert (await look(node)).faults == ()


@pytest.mark.parametrize(
    ("command", "interface", "what"),
    [
        ("ip link del tap0", "net0", "tap0 is gone"),
        ("ip link set eth1 nomaster", "net1", "eth1 is not on br1"),
        ("nft delete table netdev virtbus", "net0", "the filter of tap0 is gone"),
        ("ip link set br1 down", "net1", "br1 is down"),
    ],
)
async def test_a_check_finds_what_somebody_broke_in_the_namespace(
    node: Node, command: str, interface: str, what: str
) -> None:
    await node.attach(A, networks=TWO)
    node.inside(A, command)
    fault, *_ = (await look(node)).faults or ()
    assert (fault.interface, fault.what) == (interface, what)
    assert "audit --repair" in fault.next_step
    await node.attachments.compare()
    assert (await look(node)).faults == ()


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("ip addr flush dev virtbus0", "the route to 10.127.0.0/16 by virtbus0: gone"),
        ("ip link set virtbus0 down", "bridge virtbus0: down"),
        ("nft delete table inet virtbus", "nftables virtbus: gone"),
        ("sysctl -qw net.ipv4.ip_forward=0", "ip_forward: off"),
    ],
)
async def test_a_check_finds_what_somebody_broke_on_the_host(
    node: Node, command: str, what: str
) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        subprocess.run(["sh", "-c", command], check=True)
        assert what in [fault.what for fault in (await look(node)).faults or ()]
        await OrphanAudit(node.doors, node.attachments).mend()
        assert (await look(node)).faults == ()
        await guest.ping(node.doors.bridge.gateway.ip)


async def test_a_check_finds_interfaces_that_pass_no_frames(node: Node) -> None:
    await node.attach(A, nics=({"state": "down"},))
    (down,) = (await look(node)).faults or ()
    assert (down.interface, "link is down" in down.what) == ("net0", True)
    await node.attach(A, generation=2)
    async with node.guest(A):
        await node.attach(A, networks=TWO, generation=3)
        (waits,) = (await look(node)).faults or ()
        assert (waits.interface, "not have the device yet" in waits.what) == ("net1", True)
        node.host.namespaces.remove(f"vb-{A}")
        broken, *_ = (await look(node)).faults or ()
        assert broken.what == f"vb-{A}: gone"
