"""The description of a VM's network, and what a check of it finds."""

import subprocess

import pytest
from services.netd.tests.pretended_host import Node
from services.netd.tests.segment import BRIDGE, run
from services.netd.tests.test_network_objects import target

from virtbus.netd.core.names import host_link
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.path_check import PathCheck
from virtbus.schemas.network_path import NetworkAsk, NetworkView

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
TWO = ("default", "default")
WITHOUT_A_RULE = (
    "chain=$(nft list ruleset | grep -o 'tap0-[0-9a-f]*' | head -n 1); "
    "handle=$(nft -a list chain netdev virtbus $chain | grep -o 'handle [0-9]*$' | tail -n 1); "
    "nft delete rule netdev virtbus $chain $handle"
)
RULES = "rules of nftables virtbus: gone, added or changed"
WITH_ANOTHER_RULE = WITHOUT_A_RULE.replace("delete rule", "replace rule") + " accept"


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
        ("ip link set eth1 down", "net1", "eth1 is down"),
        ("ip link set tap1 down", "net1", "tap1 is down"),
        ("ip link set tap1 mtu 1000", "net1", "tap1 has the MTU 1000 instead of 1500"),
        ("ip link set eth1 mtu 1000", "net1", "eth1 has the MTU 1000 instead of 1500"),
        ("ip link set tap0 type bridge_slave isolated on", "net0", "tap0 is an isolated port"),
        (WITH_ANOTHER_RULE, "net0", "the filter of tap0 has other rules"),
        (WITHOUT_A_RULE, "net0", "the filter of tap0 has 10 rules of 11"),
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
        (
            "nft flush chain inet virtbus forward",
            RULES,
        ),
        (
            "handle=$(nft -a list chain inet virtbus forward | grep -o 'handle [0-9]*$' | tail -1);"
            " nft replace rule inet virtbus forward $handle accept",
            RULES,
        ),
        (
            f"ip link set {host_link(A, 0)} type bridge_slave isolated on",
            f"{host_link(A, 0)}: an isolated port",
        ),
        (f"ip link set {host_link(A, 0)} down", f"{host_link(A, 0)}: down"),
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


@pytest.mark.parametrize("kind", ["bridge", "macvtap"])
async def test_a_check_names_a_link_of_the_host_that_is_down(lan_node: Node, kind: str) -> None:
    link = BRIDGE if kind == "bridge" else "und0"
    if kind == "macvtap":
        run("ip link add und0 type veth peer name und1")
        run("ip link set und0 up")
        lan_node.links_allowed = (link,)
        await lan_node.restart()
    try:
        await lan_node.attach(A, **target(kind, link=link))
        assert (await look(lan_node)).faults == ()
        run(f"ip link set {link} down")
        await lan_node.attachments.compare()
        (fault,) = (await look(lan_node)).faults or ()
        assert fault.what == f"eth0: {link} of the host is down"
        assert fault.next_step == "set the link up on the host"
        assert fault.interface == "net0"
        await lan_node.attachments.release(A, 1)
    finally:
        subprocess.run(["ip", "link", "del", "und0"], check=False, capture_output=True)
