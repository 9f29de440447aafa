"""Networks as objects on one host: kinds nat, routed and isolated with real frames, and cni."""

import asyncio
import json
import subprocess
from asyncio.subprocess import DEVNULL
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Host, Node, eventually, ping_from_host
from services.netd.tests.test_cni import bridge, without_bridge
from services.netd.tests.test_network_path import OUTER, world
from services.netd.tests.test_recovery import gone, killed_at

from virtbus.netd.core.names import network_bridge
from virtbus.netd.core.reach import ReachRules
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
C = "0192f0c1-2d3e-7abc-8def-00000000000c"
NET = "0192f0c1-2d3e-7abc-8def-0000000000e1"
OTHER = "0192f0c1-2d3e-7abc-8def-0000000000e2"
WORLD = IPv4Address("198.51.100.2")


def target(kind: str, uid: str = NET, name: str = "blue", **spec: Any) -> dict[str, Any]:
    """A network object as a VM's record describes it."""
    if kind in {"nat", "isolated"}:
        spec.setdefault("subnet", "10.200.0.0/24")
    if kind == "routed":
        spec.setdefault("subnets", {"n1": "10.200.0.0/24"})
    about = {"uid": uid, "namespace": "default", "name": name}
    return {
        "networks": (name,),
        "network_targets": {name: about | {"spec": {"kind": kind, **spec}}},
    }


async def cannot_ping(guest: Guest, address: IPv4Address, via: IPv4Address | None = None) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await guest.ping(address, via)


async def test_a_guest_of_a_nat_network_has_its_settings_and_reaches_the_world(node: Node) -> None:
    blue = target("nat", gateway="10.200.0.254", dns=["192.0.2.53"], mtu=1400)
    with world():
        ready = await node.attach(A, **blue)
        (interface,) = ready.interfaces
        assert interface.addresses[0].startswith("10.200.0.")
        assert (interface.gateway, interface.mtu) == ("10.200.0.254", 1400)
        async with node.guest(A) as guest:
            await guest.ping(WORLD, via=IPv4Address("10.200.0.254"))
            await ping_from_host(str(guest.ip))


async def test_nobody_opens_a_connection_to_a_guest_of_another_nat_network(node: Node) -> None:
    await node.attach(A, **target("nat"))
    await node.attach(B, **target("nat", OTHER, "red", subnet="10.201.0.0/24"))
    await node.attach(C)
    async with node.guest(A) as one, node.guest(B) as other, node.guest(C) as third:
        for source, gateway in ((one, "10.200.0.1"), (third, "10.127.0.1")):
            await cannot_ping(source, other.ip, via=IPv4Address(gateway))


async def test_guests_of_one_network_reach_each_other_in_each_kind(node: Node) -> None:
    for kind in ("nat", "routed", "isolated"):
        await node.attach(A, **target(kind))
        await node.attach(B, **target(kind))
        async with node.guest(A) as one, node.guest(B) as other:
            await one.ping(other.ip)
            await other.ping(one.ip)
        for uid in (A, B):
            await node.attachments.release(uid, 1)
        await node.attachments.tidy()
        node.stop()
        await node.restart()


async def test_a_routed_guest_has_its_own_address_in_the_world(node: Node) -> None:
    with world():
        route = f"ip -n {OUTER} route add 10.200.0.0/24 via 198.51.100.1"
        await node.attach(A, **target("routed"))
        async with node.guest(A) as guest:
            with pytest.raises(
                TimeoutError
            ):  # the world has no route back, and nothing masquerades
                await guest.ping(WORLD, via=IPv4Address("10.200.0.1"))
            subprocess.run(route.split(), check=True)
            await guest.ping(WORLD, via=IPv4Address("10.200.0.1"))
            ping = f"ip netns exec {OUTER} ping -c 1 -W 2 {guest.ip}"
            process = await asyncio.create_subprocess_exec(*ping.split(), stdout=DEVNULL)
            assert await process.wait() == 0


async def test_a_guest_of_an_isolated_network_reaches_no_host_and_no_world(node: Node) -> None:
    with world():
        ready = await node.attach(A, **target("isolated"))
        assert ready.interfaces[0].gateway == ""
        await node.attach(B)
        async with node.guest(A) as guest, node.guest(B) as other:
            for address in (WORLD, IPv4Address("10.200.0.1"), IPv4Address("10.127.0.1"), other.ip):
                await cannot_ping(guest, address, via=IPv4Address("10.200.0.1"))


async def test_two_isolated_networks_may_have_one_subnet(node: Node) -> None:
    await node.attach(A, **target("isolated"))
    await node.attach(B, **target("isolated", OTHER, "red"))
    async with node.guest(A) as one, node.guest(B) as other:
        await cannot_ping(one, other.ip)


async def test_a_subnet_that_the_host_or_the_fleet_has_is_refused(node: Node) -> None:
    await node.attach(A)
    with pytest.raises(VirtbusError, match="has the address"):
        await node.attach(B, **target("nat", OTHER, subnet="10.127.8.0/24"))
    node.doors.attachers.bridges.set_reach(ReachRules(hosts=frozenset({IPv4Address("10.200.0.9")})))
    with pytest.raises(VirtbusError, match=r"10\.200\.0\.9"):
        await node.attach(B, **target("nat"))


async def test_an_exhausted_pool_and_a_foreign_node_are_refused(node: Node) -> None:
    small = target("isolated", subnet="10.200.0.0/29")
    uids = [f"0192f0c1-2d3e-7abc-8def-0000000001{number:02}" for number in range(6)]
    for uid in uids[:5]:
        await node.attach(uid, **small)
    with pytest.raises(VirtbusError, match="'blue' cannot grow"):
        await node.attach(uids[5], **small)
    with pytest.raises(VirtbusError) as refused:
        await node.attach(A, **target("routed", OTHER, "red", subnets={"n2": "10.9.0.0/24"}))
    assert refused.value.reason == "network_not_here"
    assert refused.value.body.details[0].path == "spec.networks[0].network"


async def test_a_later_netd_adopts_and_removes_the_bridges(host: Host, node: Node) -> None:
    await node.attach(A, **target("nat"))
    await node.restart()
    ready = await node.attach(A, **target("nat"))
    assert ready.phase is NetPhase.READY
    async with node.guest(A) as guest:
        await guest.ping(IPv4Address("10.200.0.1"))
    await node.attachments.release(A, 1)
    await node.restart()
    await node.attachments.tidy()
    await eventually(lambda: network_bridge(NET) not in host.census()["links"])


async def test_forwarding_ends_with_the_last_bridge_of_any_network(host: Host, node: Node) -> None:
    before = host.census()["ip_forward"]
    await node.attach(A, **target("nat"))
    await node.attach(B)
    for uid in (A, B):
        await node.attachments.release(uid, 1)
        await node.attachments.tidy()
    assert host.census()["ip_forward"] == before


async def test_a_lost_bridge_of_a_network_is_made_again(node: Node) -> None:
    await node.attach(A, **target("nat"))
    subprocess.run(["ip", "link", "del", network_bridge(NET)], check=True)
    await node.attachments.replug()
    async with node.guest(A) as guest:
        await guest.ping(IPv4Address("10.200.0.1"))


async def test_a_conflist_in_the_object_runs_allowed_plugins_only(node: Node) -> None:
    chain = bridge(node, capabilities={"mac": True})
    blue = target("cni", config=json.dumps({"cniVersion": "1.0.0", "plugins": [chain]}))
    ready = await node.attach(A, **blue)
    try:
        assert ready.interfaces[0].addresses[0].startswith("10.88.0.")
        chain["ipam"]["type"] = "dhcp"
        red = target("cni", OTHER, config=json.dumps({"cniVersion": "1.0.0", "plugins": [chain]}))
        with pytest.raises(VirtbusError, match=r"runs dhcp at plugins\[0\]\.ipam\.type") as refused:
            await node.attach(B, **red)
        assert refused.value.reason == "plugin_forbidden"
    finally:
        await node.attachments.release(A, 1)
        without_bridge()


@pytest.mark.long
def test_after_a_kill_at_any_step_a_network_is_whole_or_gone(host: Host) -> None:
    before, step = host.census(), 0

    async def attach() -> None:
        node = Node(host)
        await node.start()
        await node.attach(A, **target("nat"))
        node.stop()

    async def release() -> None:
        node = Node(host)
        await node.start()
        await node.attachments.release(A, 1)
        await node.attachments.tidy()

    async def works() -> None:
        node = Node(host)
        await node.start()
        await node.attach(A, **target("nat"))
        async with node.guest(A) as guest:
            await guest.ping(IPv4Address("10.200.0.1"))
        node.stop()

    while killed_at(step := step + 1, attach):
        asyncio.run(works())
        asyncio.run(gone(host, census=before))
    assert step > 20
    step = 0
    while killed_at(step := step + 1, release):
        asyncio.run(works())
    assert step > 10
    asyncio.run(gone(host, census=before))
