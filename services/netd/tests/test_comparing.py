"""Another program removes parts of a VM's network: netd notices, repairs and reports it."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import Guest, Node
from services.netd.tests.test_cni import bridge, conflist, without_bridge

from virtbus.netd.core.names import netns
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
GATEWAY = IPv4Address("10.127.0.1")
EMULATOR = "import sys; print(flush=True); sys.stdin.read()"


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Guest]:
    """A guest whose tap is also open in an emulator's process."""
    attachment, taps = await node.attachments.take_taps(A, 5.0)
    nic = attachment.nics[0]
    with subprocess.Popen(
        [sys.executable, "-c", EMULATOR, "-uuid", A],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=taps,
    ) as emulator:
        assert emulator.stdout is not None
        emulator.stdout.readline()
        guest = Guest(taps[0], nic.mac, nic.addresses[0] if nic.addresses else "0.0.0.0/0")
        try:
            yield guest
        finally:
            guest.close()
            for fd in taps[1:]:
                os.close(fd)
            emulator.communicate()


def phase(node: Node) -> NetPhase | None:
    state = node.attachments.state_of(A)
    return state.phase if state is not None else None


async def test_a_network_that_is_whole_is_no_finding(node: Node) -> None:
    await node.attach(A)
    assert await node.attachments.compare() == []
    async with running(node):
        assert await node.attachments.compare() == []
    assert phase(node) is NetPhase.READY


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_namespace_unnamed_under_a_running_guest_gets_its_name_back(
    node: Node, restarted: bool
) -> None:
    await node.attach(A)
    async with running(node) as guest:
        node.host.namespaces.remove(netns(A))
        if restarted:
            await node.restart()
        else:
            (finding,) = await node.attachments.compare()
            assert finding.error is None
            assert f"{netns(A)} is gone" in finding.message
        assert node.host.namespaces.exists(netns(A))
        assert phase(node) is NetPhase.READY
        await guest.ping(GATEWAY)
        assert await node.attachments.compare() == []


async def test_a_record_seen_again_does_not_cut_off_a_guest_of_an_unnamed_namespace(
    node: Node,
) -> None:
    await node.attach(A)
    async with running(node) as guest:
        node.host.namespaces.remove(netns(A))
        ready = await node.attach(A)
        assert ready.phase is NetPhase.READY
        await guest.ping(GATEWAY)


@pytest.mark.parametrize(
    "command",
    [
        "ip link set eth0 nomaster",
        "ip link del br0",
        "ip link del eth0",
        "ip link set tap0 nomaster",
        "nft flush ruleset",
    ],
)
async def test_missing_parts_inside_are_made_again_under_the_guest(
    node: Node, command: str
) -> None:
    await node.attach(A)
    async with running(node) as guest:
        node.inside(A, command)
        (finding,) = await node.attachments.compare()
        assert finding.reason == "network_mended"
        await guest.ping(GATEWAY)
        assert await node.attachments.compare() == []


async def test_the_hosts_rules_are_restored_after_a_firewall_reload(
    node: Node,
) -> None:
    await node.attach(A)
    rules = ("nft", "-s", "list", "table", "inet", "virtbus")
    before = subprocess.check_output(rules)
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    await node.attachments.replug()
    assert subprocess.check_output(rules) == before
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    forward.write_text("0")
    await node.attachments.replug()
    assert subprocess.check_output(rules) == before
    assert forward.read_text().strip() == "1"
    async with running(node) as guest:
        await guest.ping(GATEWAY)


async def test_a_tap_removed_under_a_guest_is_reported_until_its_restart(
    node: Node,
) -> None:
    first = await node.attach(A)
    async with running(node):
        node.inside(A, "ip link del tap0")
        (finding,) = await node.attachments.compare()
        assert finding.error is not None
        assert (finding.reason, finding.error.code) == ("network_lost", 409)
        assert "stop and start the VM" in finding.message
        assert phase(node) is NetPhase.FAILED
        with pytest.raises(VirtbusError, match="stop and start the VM"):
            await node.attach(A)
        assert await node.attachments.compare() == []  # reported once
    again = await node.attach(A)
    assert again.interfaces == first.interfaces
    async with running(node) as guest:
        await guest.ping(GATEWAY)
        assert await node.attachments.compare() == []


async def test_a_tap_removed_while_no_guest_runs_is_back_at_once(node: Node) -> None:
    await node.attach(A)
    node.inside(A, "ip link del tap0")
    (finding,) = await node.attachments.compare()
    assert finding.error is None
    node.inside(A, "ip link del tap0")
    await node.attach(A)  # the same without a comparison
    async with running(node) as guest:
        await guest.ping(GATEWAY)


async def test_a_removed_cni_link_is_reported_and_made_again_at_the_next_start(
    node: Node,
) -> None:
    conflist(node, "lan", bridge(node))
    await node.attach(A, networks=("lan",))
    try:
        async with running(node):
            node.inside(A, "ip link del eth0")
            (finding,) = await node.attachments.compare()
            assert finding.reason == "network_lost"
        await node.attach(A, networks=("lan",))
        async with running(node) as guest:
            await guest.ping(IPv4Address("10.88.0.1"))
        await node.attachments.release(A, 1)
    finally:
        without_bridge()
