"""Debian's CNI plugins, each in a chain as operators write it: a guest, its traffic, its end."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Host, Node
from services.netd.tests.segment import FAR_NETNS, run
from services.netd.tests.test_cni import (
    A,
    bridge,
    conflist,
    forget_rules,
    leases,
    rules,
    without_bridge,
)
from services.netd.tests.test_network_path import world

from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.path_check import PathCheck
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_path import NetworkAsk

pytestmark = [pytest.mark.integration, pytest.mark.long]

OUTSIDE = IPv4Address("198.51.100.2")
Chain = Callable[[Node], tuple[dict[str, Any], ...]]


def host_local(node: Node, subnet: str = "10.88.0.0/24") -> dict[str, Any]:
    return {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(node.host.tmp / "ipam"),
    }


def bridged(node: Node) -> tuple[dict[str, Any], ...]:
    rate = 10**9
    limits = {"ingressRate": rate, "ingressBurst": rate, "egressRate": rate, "egressBurst": rate}
    return (
        bridge(node, ipMasq=True, capabilities={"mac": True, "ips": True}),
        {"type": "portmap", "capabilities": {"portMappings": True}},
        {"type": "firewall"},
        {"type": "bandwidth", **limits},
    )


def ptp(node: Node) -> tuple[dict[str, Any], ...]:
    return ({"type": "ptp", "ipMasq": True, "ipam": host_local(node)},)


def static(node: Node) -> tuple[dict[str, Any], ...]:
    ipam = {
        "type": "static",
        "addresses": [{"address": "10.88.0.200/24", "gateway": "10.88.0.1"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.88.0.1"}],
    }
    return (bridge(node, ipMasq=True, ipam=ipam), {"type": "tuning", "sysctl": {}})


async def joined(node: Node) -> InterfaceStatus:
    """Attach a guest; plugins that choose the MAC are known as such after the first attempt."""
    with suppress(VirtbusError):  # cni_mac
        return (await node.attach(A, networks=("lan",))).interfaces[0]
    return (await node.attach(A, networks=("lan",))).interfaces[0]


@contextmanager
def without_traces(host: Host) -> Iterator[None]:
    """Check that only the plugins' bridge and empty chains stay, and remove these."""
    before = host.census()["links"]
    try:
        yield
        assert host.census()["links"] - before <= {"cnitest0"}
        assert "10.88.0." not in rules()
    finally:
        without_bridge()
        forget_rules()


@pytest.mark.parametrize("chain", [bridged, ptp, static])
async def test_a_chain_carries_traffic_passes_its_check_and_leaves_nothing(
    node: Node, chain: Chain
) -> None:
    conflist(node, "lan", *chain(node))
    checks = PathCheck(node.doors, node.attachments, OrphanAudit(node.doors, node.attachments))
    with world(), without_traces(node.host):
        interface = await joined(node)
        async with node.guest(A) as guest:
            await guest.ping(OUTSIDE, via=IPv4Address(interface.gateway))
        view = await checks.view(NetworkAsk(uid=A, check=True))
        assert view.faults is not None
        assert [one.what for one in view.faults if "CNI" in one.what] == []
        await node.restart()
        async with node.guest(A) as guest:
            await guest.ping(OUTSIDE, via=IPv4Address(interface.gateway))
        await node.attachments.release(A, 1)
        assert leases(node) == []


async def test_check_finds_rules_that_somebody_removed(node: Node) -> None:
    conflist(node, "lan", *bridged(node))
    checks = PathCheck(node.doors, node.attachments, OrphanAudit(node.doors, node.attachments))
    with without_traces(node.host):
        await node.attach(A, networks=("lan",))
        run("iptables -F CNI-FORWARD")
        view = await checks.view(NetworkAsk(uid=A, check=True))
        assert view.faults is not None
        (fault,) = [one for one in view.faults if "CNI" in one.what]
        assert (fault.interface, "firewall misses" in fault.what) == ("net0", True)
        await node.attachments.release(A, 1)


@pytest.mark.parametrize("kind", ["macvlan", "host-device"])
async def test_a_link_of_the_host_is_returned(node: Node, kind: str) -> None:
    """macvlan makes a link on one of the host, and host-device takes that one."""
    run(f"ip netns add {FAR_NETNS}")
    try:
        run(f"ip link add und0 type veth peer name und1 netns {FAR_NETNS}")
        run("ip link set und0 up")
        run(f"ip -n {FAR_NETNS} addr add 10.88.0.1/24 dev und1")
        run(f"ip -n {FAR_NETNS} link set und1 up")
        link = {"master": "und0"} if kind == "macvlan" else {"device": "und0"}
        mac = {"capabilities": {"mac": True}}
        conflist(node, "lan", {"type": kind, **link, **mac, "ipam": host_local(node)})
        interface = await joined(node)
        assert interface.addresses[0].startswith("10.88.0.")
        async with node.guest(A) as guest:
            await guest.ping(IPv4Address("10.88.0.1"))
        await node.attachments.release(A, 1)
        assert "und0" in node.host.census()["links"]
        assert leases(node) == []
    finally:
        subprocess.run(["ip", "link", "del", "und0"], check=False)
        run(f"ip netns del {FAR_NETNS}")
