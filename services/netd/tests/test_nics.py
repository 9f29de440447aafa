"""Properties of interfaces on a real kernel: queues, MTU, link state, limits."""

import asyncio
import os
import time
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Node

from virtbus.netd.core import names
from virtbus.netd.core.traffic_control import burst_of
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.nic import NICS_MAX, NicLimit

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Address("10.127.0.1")
SLOW = 200_000
FRAME = 1400


def limits(rate: int) -> dict[str, Any]:
    return {"limits": {"inbound": {"bytes_per_s": rate}, "outbound": {"bytes_per_s": rate}}}


async def reaches_gateway(guest: Guest) -> bool:
    try:
        await asyncio.wait_for(guest.ping(GATEWAY), 0.5)
    except TimeoutError:
        return False
    return True


@pytest.mark.integration
async def test_a_link_that_goes_down_and_up_again_under_a_running_guest(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        down = await node.attach(A, nics=({"state": "down"},), generation=2)
        assert [one.state for one in down.interfaces] == ["down"]
        assert not await reaches_gateway(guest)
        await node.restart()
        await node.attachments.compare()
        assert not await reaches_gateway(guest)
        up = await node.attach(A, generation=3)
        assert [one.state for one in up.interfaces] == ["up"]
        await guest.ping(GATEWAY)


@pytest.mark.integration
async def test_a_comparison_takes_a_link_down_again(node: Node) -> None:
    await node.attach(A, nics=({"state": "down"},))
    assert node.inside(A, "ip link set br0 up") == ""
    (finding,) = await node.attachments.compare()
    assert "br0 is up" in str(finding)
    async with node.guest(A) as guest:
        assert not await reaches_gateway(guest)


async def flood(sender: Guest, receiver: Guest, frames: int) -> float:
    """Send frames without a pause; return bytes per second at the receiver, until a gap."""
    to = await sender.resolve(receiver.ip)
    data = bytes(FRAME - 42)
    for _ in range(frames):
        sender.send(sender.udp(to, receiver.ip, (9, 9), data))
    received, begun = 0, time.monotonic()
    last = begun
    try:
        while True:
            await receiver.receive(lambda f: len(f) == FRAME, timeout_s=0.3)
            received, last = received + FRAME, time.monotonic()
    except TimeoutError:
        return received / max(last - begun, 0.001)


@pytest.mark.integration
@pytest.mark.parametrize("limited", ["sender", "receiver"])
async def test_a_limit_of_either_direction_holds_and_goes_while_guests_run(
    node: Node, limited: str
) -> None:
    slow = A if limited == "sender" else B
    await node.attach(A)
    await node.attach(B)
    async with node.guest(A) as one, node.guest(B) as other:
        await one.ping(other.ip)
        await node.attach(slow, nics=(limits(SLOW),), generation=2)
        burst = burst_of(NicLimit(bytes_per_s=SLOW), 1500)
        passed = await flood(one, other, 40)
        assert 0.5 * SLOW < passed < 1.3 * SLOW + burst / 0.1
        await node.restart()
        assert await node.attachments.compare() == []
        assert node.inside(slow, "tc qdisc show").count("tbf") == 2
        await node.attach(slow, generation=3)
        assert node.inside(slow, "tc qdisc show").count("tbf") == 0
        assert await flood(one, other, 40) > 5 * SLOW


@pytest.mark.integration
async def test_a_limit_that_somebody_removed_is_found_and_comes_back(node: Node) -> None:
    await node.attach(A, nics=(limits(10**10),))
    node.inside(A, "tc qdisc del dev tap0 root")
    (finding,) = await node.attachments.compare()
    assert "the limit of tap0 is gone" in str(finding)
    assert "rate 80Gbit" in node.inside(A, "tc qdisc show dev tap0")


@pytest.mark.integration
async def test_a_tap_with_queues_gives_one_descriptor_for_each_and_to_one_process(
    node: Node,
) -> None:
    ready = await node.attach(A, networks=("default", "default"), nics=({"queues": 3}, {}))
    assert [one.queues for one in ready.interfaces] == [3, 1]
    _, taps = await node.attachments.take_taps(A, 5.0)
    try:
        assert len(taps) == 4
        assert "numtxqueues" in node.inside(A, "ip -d link show tap0")
        with pytest.raises(VirtbusError) as refused:
            await node.attachments.take_taps(A, 5.0)
        assert refused.value.reason == "tap_busy"
        await node.restart()
        assert await node.attachments.compare() == []
    finally:
        for fd in taps:
            os.close(fd)
    again = await node.attach(A, networks=("default", "default"), generation=2)
    assert [one.queues for one in again.interfaces] == [1, 1]


@pytest.mark.integration
async def test_a_vm_has_32_interfaces_which_work_and_leave_nothing(node: Node) -> None:
    all_of_default = ("default",) * NICS_MAX
    ready = await node.attach(A, networks=all_of_default)
    assert len({one.addresses for one in ready.interfaces}) == NICS_MAX
    for index in (0, 10, NICS_MAX - 1):
        async with node.guest(A, index) as guest:
            await guest.ping(GATEWAY)
    ends = {nic.host_link for nic in node.attachments.nics()}
    assert len(ends) == NICS_MAX
    assert all(len(name) <= 15 and names.is_host_link(name) for name in ends)
    await node.restart()
    assert await node.attach(A, networks=all_of_default) == ready
    assert await node.attachments.compare() == []


@pytest.mark.integration
async def test_the_mtu_is_at_most_the_networks_and_the_guest_is_told(node: Node) -> None:
    with pytest.raises(VirtbusError) as refused:
        await node.attach(A, nics=({"mtu": 1501},))
    assert refused.value.reason == "mtu_too_large"
    assert [one.path for one in refused.value.body.details] == [
        "spec.domain.devices.interfaces[0].mtu"
    ]
    assert A not in node.host.census()["netns"]
    ready = await node.attach(A, nics=({"mtu": 1400},))
    assert [one.mtu for one in ready.interfaces] == [1400]
    assert "mtu 1400" in node.inside(A, "ip link show tap0")


def test_a_bucket_holds_a_frame_and_ten_milliseconds() -> None:
    assert burst_of(NicLimit(bytes_per_s=1000), 1500) == 16 * 1024
    assert burst_of(NicLimit(bytes_per_s=10**9), 1500) == 10**7
    assert burst_of(NicLimit(bytes_per_s=1000, burst_bytes=1600), 9000) == 9018
    assert burst_of(NicLimit(bytes_per_s=10**12), 1500) == 2**31 - 1
