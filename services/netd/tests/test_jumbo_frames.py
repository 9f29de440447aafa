"""Networks with an MTU of 9000: real pings that may not be fragmented, and guests' frames."""

import struct
import subprocess
from ipaddress import IPv4Address

import pytest
from services.netd.tests.pretended_host import Guest, Node, checksum
from services.netd.tests.segment import Segment, run
from services.netd.tests.test_network_objects import A, B, target
from services.netd.tests.test_overlay_networks import (
    FAR,
    PEER,
    far,
    joined,
    overlay,
    spanning,
    told,
    underlay,
)
from services.netd.tests.test_overlay_networks import MEMBER as FAR_MEMBER

from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration
__all__ = ["spanning", "underlay"]

MTU = 9000
PING = "ping -c 1 -W 2 -M do"


async def echoes(guest: Guest, address: IPv4Address, size: int) -> None:
    """Return once a large echo request was answered in one packet."""
    mac = await guest.resolve(address)
    icmp = struct.pack("!BBHHH", 8, 0, 0, 7, 2) + bytes(size)
    icmp = icmp[:2] + struct.pack("!H", checksum(icmp)) + icmp[4:]
    guest.send(guest.ipv4(mac, address, 1, icmp))
    reply = await guest.receive(lambda f: f[23] == 1 and f[34] == 0 and len(f) > size)
    assert len(reply) == 14 + 20 + 8 + size


async def test_large_frames_pass_a_nat_network_between_guests_and_to_the_host(node: Node) -> None:
    jumbo = target("nat", mtu=MTU)
    for uid in (A, B):
        (nic,) = (await node.attach(uid, **jumbo)).interfaces
        assert nic.mtu == MTU
    async with node.guest(A) as one, node.guest(B) as two:
        await echoes(one, two.ip, 8000)
        await echoes(one, IPv4Address("10.200.0.1"), 8000)
    for number, uid in ((201, A), (202, B)):
        node.inside(uid, f"ip addr add 10.200.0.{number}/24 dev br0")
    assert "8008 bytes" in node.inside(A, f"{PING} -s 8000 10.200.0.202")
    assert "8008 bytes" in run(f"{PING} -s 8000 10.200.0.201")
    with pytest.raises(subprocess.CalledProcessError):
        node.inside(A, f"{PING} -s 8973 10.200.0.202")  # 9001 bytes with its headers
    assert await node.attachments.compare() == []
    await node.restart()
    assert "8008 bytes" in node.inside(A, f"{PING} -s 8000 10.200.0.202")


async def test_an_interface_with_a_small_mtu_leaves_the_others_theirs(node: Node) -> None:
    jumbo = target("isolated", mtu=MTU)
    await node.attach(A, **jumbo)
    (small,) = (await node.attach(B, **jumbo, nics=({"mtu": 1400},))).interfaces
    assert small.mtu == 1400
    bridge = node.doors.attachers.bridges.name_of(node.attachments.nics()[0])
    assert f"mtu {MTU}" in run(f"ip link show {bridge}")
    with pytest.raises(VirtbusError, match="asks for an MTU of 9001, and the network 'blue'"):
        await node.attach(B, **jumbo, nics=({"mtu": 9001},), generation=2)


async def test_an_overlay_has_the_mtu_that_its_underlay_carries(
    spanning: Node, underlay: Segment
) -> None:
    with pytest.raises(VirtbusError, match="has an MTU of 9000, and tunnels of this node carry"):
        await spanning.attach(A, **overlay(mtu=MTU))
    run(f"ip link set und0 mtu {MTU + 50}")
    run(f"ip -n {PEER} link set und1 mtu {MTU + 50}")
    run(f"ip -n {PEER} link set vx mtu {MTU}")
    await joined(spanning, mtu=MTU)
    told(spanning, far(FAR_MEMBER))
    async with spanning.guest(A) as guest:
        await echoes(guest, FAR, 8000)
