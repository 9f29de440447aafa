"""Two instances of virtbus on one host: neither touches the other's objects."""

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import Host, Node

from virtbus.netd.core.names import OWNER_PREFIX, host_link, netns, owner_mark
from virtbus.schemas.errors import VirtbusError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Address("10.127.0.1")


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def neighbour(host: Host) -> Node:
    """Another instance with a bridge and a subnet of its own."""
    return Node(host, "10.99.0.1/24", bridge="second0", state="second")


@asynccontextmanager
async def started(node: Node) -> AsyncIterator[Node]:
    await node.start()
    try:
        yield node
    finally:
        node.stop()


async def test_a_second_netd_on_the_same_bridge_is_refused_and_changes_nothing(node: Node) -> None:
    await node.attach(A)
    before = node.host.census()
    rules = run("nft", "list", "ruleset")
    second = Node(node.host, state="second")
    with pytest.raises(VirtbusError, match="VIRTBUS_BRIDGE, VIRTBUS_SUBNET") as refused:
        await second.start()
    second.stop()
    assert (refused.value.code, refused.value.reason) == (409, "bridge_in_use")
    assert str(node.state_dir) in refused.value.body.message
    assert node.host.census() == before
    assert run("nft", "list", "ruleset") == rules
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)


async def test_a_bridge_taken_by_another_while_netd_runs_is_left_to_it(node: Node) -> None:
    async with started(Node(node.host, state="second")) as second:
        await node.attach(A)
        with pytest.raises(VirtbusError, match="belongs to"):
            await second.attach(B)
        await second.attachments.release(B, 1)
        (second.state_dir / "netd/host.json").write_text('{"ip_forward": "0"}')
        await second.attachments.tidy()
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"
        async with node.guest(A) as guest:
            await guest.ping(GATEWAY)


async def test_recovery_and_end_of_a_neighbour_leave_our_vms_alone(node: Node) -> None:
    await node.attach(A)
    second = neighbour(node.host)
    async with started(second):
        await second.attach(B)
        await second.restart()
        await node.restart()
        assert set(node.attachments.resources()) == {A}
        assert set(second.attachments.resources()) == {B}
        async with node.guest(A) as ours, second.guest(B) as theirs:
            await ours.ping(GATEWAY)
            await theirs.ping(IPv4Address("10.99.0.1"))
        await second.attachments.release(B, 1)
        await second.attachments.tidy()
    assert node.host.census()["netns"] == [netns(A)]
    assert "table inet virtbus" in run("nft", "list", "tables")
    assert "second" not in run("nft", "list", "tables") + run("ip", "link")
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)


async def test_a_neighbour_with_its_own_bridge_but_our_subnet_is_refused(node: Node) -> None:
    await node.attach(A)
    async with started(Node(node.host, bridge="second0", state="second")) as second:
        with pytest.raises(VirtbusError, match="VIRTBUS_SUBNET"):
            await second.attach(B)
        await second.attachments.release(B, 1)


async def test_an_unmarked_bridge_is_adopted_and_marked(node: Node) -> None:
    run("ip", "link", "add", "virtbus0", "type", "bridge")
    await node.restart()
    await node.attach(A)
    assert f"alias {OWNER_PREFIX}{node.state_dir}" in run("ip", "link", "show", "virtbus0")


async def test_only_stale_links_on_our_own_bridge_are_removed(node: Node) -> None:
    await node.attach(A)
    stale, foreign = host_link(B, 0), host_link(B, 1)
    for name in (stale, foreign):
        run("ip", "link", "add", name, "type", "veth", "peer", "name", f"p{name[-1]}")
    run("ip", "link", "set", stale, "master", "virtbus0")
    await node.restart()
    there = node.host.census()["links"]
    assert {host_link(A, 0), foreign} <= there
    assert stale not in there
    run("ip", "link", "delete", foreign)


def test_the_mark_of_a_long_path_fits_an_alias() -> None:
    assert owner_mark("/srv/vb") == "virtbus:/srv/vb"
    long = "/" + "x" * os.pathconf("/", "PC_PATH_MAX")
    assert len(owner_mark(long)) <= 255
    assert owner_mark(long) != owner_mark(long + "y")
