"""Networks of clusters: guests on links as Calico, flannel and Weave make them."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

import pytest
from services.netd.tests.pretended_host import Node
from services.netd.tests.recorded_results import CALICO, WEAVE
from services.netd.tests.segment import BROADCAST, run
from services.netd.tests.test_cni import A, bridge, conflist, plugin, without_bridge
from services.netd.tests.test_dhcp import request
from services.netd.tests.test_dhcp_server import reply
from services.netd.tests.test_network_path import OUTER, world

from virtbus.netd.core.dhcp import MessageType
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

OUTSIDE = IPv4Address("198.51.100.2")
CALICO_WAY = IPv4Address("169.254.1.1")
_LIKE_CALICO = """
[ "$CNI_COMMAND" = ADD ] || exit 0
in="nsenter --net=$CNI_NETNS ip"
ip link del cali0 2> /dev/null
ip link add cali0 type veth peer name $CNI_IFNAME netns $CNI_NETNS
ip link set cali0 up
echo 1 > /proc/sys/net/ipv4/conf/cali0/proxy_arp
echo 0 > /proc/sys/net/ipv4/neigh/cali0/proxy_delay
ip route add 192.168.39.65 dev cali0 scope link
$in link set $CNI_IFNAME up
$in addr add 192.168.39.65/32 dev $CNI_IFNAME
$in route add 169.254.1.1 dev $CNI_IFNAME scope link
$in route add default via 169.254.1.1 dev $CNI_IFNAME
"""
_LIKE_WEAVE = """
[ "$CNI_COMMAND" = ADD ] || exit 0
in="nsenter --net=$CNI_NETNS ip"
ip link del vethwepl0 2> /dev/null
ip link add vethwepl0 type veth peer name $CNI_IFNAME netns $CNI_NETNS
ip link set vethwepl0 master weave up
bridge link set dev vethwepl0 hairpin on
$in link set $CNI_IFNAME up
$in addr add 10.32.0.2/12 dev $CNI_IFNAME
$in route add default via 10.32.0.1 dev $CNI_IFNAME
$in route add 224.0.0.0/4 dev $CNI_IFNAME
"""


async def attached(node: Node) -> str:
    """Attach a guest to plugins that choose the MAC; return its address."""
    with pytest.raises(VirtbusError, match="takes their MAC"):
        await node.attach(A, networks=("lan",))
    return (await node.attach(A, networks=("lan",))).interfaces[0].addresses[0]


@contextmanager
def forwarding() -> Iterator[None]:
    """The host forwards and has a default route, as a node of a cluster; its world has one back."""
    with world():
        run("sysctl -qw net.ipv4.ip_forward=1")
        run(f"ip route add default via {OUTSIDE}")
        run(f"ip -n {OUTER} route add default via 198.51.100.1")
        try:
            yield
        finally:
            run("sysctl -qw net.ipv4.ip_forward=0")


async def test_a_guest_of_calico_goes_out_by_a_gateway_that_no_result_names(node: Node) -> None:
    plugin(node, "calico", f"{_LIKE_CALICO}echo '{json.dumps(CALICO)}'")
    conflist(node, "lan", {"type": "calico"})
    with forwarding():
        assert await attached(node) == "192.168.39.65/32"
        async with node.guest(A) as guest:
            await guest.ping(OUTSIDE, via=CALICO_WAY)
            message = request(MessageType.DISCOVER, mac=guest.mac)
            ports, every = (68, 67), IPv4Address("255.255.255.255")
            guest.send(guest.udp(BROADCAST, every, ports, message, source=IPv4Address(0)))
            offer = await reply(guest)
            assert bytes((121, 14, 32, *CALICO_WAY.packed, 0, 0, 0, 0, 0)) in offer
            await node.restart()
            await guest.ping(OUTSIDE, via=CALICO_WAY)
        await node.attachments.release(A, 1)


async def test_a_guest_of_flannel_hears_its_answers_although_its_broadcasts_return(
    node: Node,
) -> None:
    """flannel's bridge has ports in hairpin mode, and a route without a gateway to all pods."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": "10.88.0.0/24"}]],
        "routes": [{"dst": "10.88.0.0/16"}],
        "dataDir": str(node.host.tmp / "ipam"),
    }
    more = {"hairpinMode": True, "isDefaultGateway": True, "ipam": ipam}
    conflist(node, "lan", bridge(node, capabilities={"mac": True}, **more))
    try:
        with forwarding():
            ready = await node.attach(A, networks=("lan",))
            async with node.guest(A) as guest:
                for _round in range(3):
                    every = IPv4Address("255.255.255.255")
                    guest.send(guest.udp(BROADCAST, every, (1, 1), b"to all"))
                    await guest.ping(OUTSIDE, via=IPv4Address("10.88.0.1"))
            assert ready.interfaces[0].gateway == "10.88.0.1"
            (attachment,) = node.attachments.ready()
            assert [(one.destination, one.gateway) for one in attachment.nics[0].routes] == [
                ("10.88.0.0/16", "10.88.0.1")
            ]
            await node.attachments.release(A, 1)
    finally:
        without_bridge()


async def test_a_guest_of_weave_takes_its_gateway_from_the_link(node: Node) -> None:
    plugin(node, "weave-net", f"{_LIKE_WEAVE}echo '{json.dumps(WEAVE)}'")
    conflist(node, "lan", {"type": "weave-net"})
    try:
        with forwarding():
            run("ip link add weave type bridge")
            run("ip addr add 10.32.0.1/12 dev weave")
            run("ip link set weave up")
            assert await attached(node) == "10.32.0.2/12"
            async with node.guest(A) as guest:
                await guest.ping(OUTSIDE, via=IPv4Address("10.32.0.1"))
            await node.attachments.release(A, 1)
    finally:
        subprocess.run(["ip", "link", "del", "weave"], check=False)
