"""Guests of CNI plugins reach what those of the built-in network reach, and no host."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from services.netd.tests.pretended_host import Node, eventually, ping_from_host
from services.netd.tests.segment import FAR_NETNS, ping_from, run
from services.netd.tests.test_cni import GATEWAY, A, B, bridge, conflist, without_bridge
from services.netd.tests.test_cni_matrix import host_local
from services.netd.tests.test_network_path import OUTER, answers, listening, world
from services.netd.tests.test_service import settings_on

from virtbus.netd import host_networks
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.orphan_audit import HOST, OrphanAudit

pytestmark = pytest.mark.integration

HOSTS = IPv4Address("198.51.100.1")
FAR, NEXT, LAST = (IPv4Address(f"198.51.100.{last}") for last in (2, 3, 4))
METADATA = IPv4Address("169.254.169.254")
TABLE = "virtbus_plugins"


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """The host forwards, and serves ssh, the bus and names; another network is behind it."""
    with world(NEXT, LAST), listening("0.0.0.0", 22, 53, 4222):
        run("sysctl -qw net.ipv4.ip_forward=1")
        run(f"ip -n {OUTER} route add 10.88.0.0/24 via 198.51.100.1")
        run(f"ip addr add {METADATA}/32 dev lo")
        try:
            yield
        finally:
            run(f"ip addr del {METADATA}/32 dev lo")
            without_bridge()


def tables() -> str:
    return run("nft list tables")


def guests() -> set[str]:
    """The addresses of guests in the table."""
    listed = json.loads(run(f"nft -j list set inet {TABLE} guests"))
    return set(listed["nftables"][1]["set"].get("elem", ()))


def of(*addresses: IPv4Address, **more: Any) -> ReachRules:
    return ReachRules(hosts=frozenset(addresses), **more)


async def sync(node: Node, reach: ReachRules) -> None:
    node.doors.bridge.reach = reach
    node.doors.attachers.plugin_reach.sync()


async def test_a_guest_reaches_no_host_and_others_reach_the_guest(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    with surroundings():
        await node.attach(A, networks=("lan",))
        async with node.guest(A) as guest:
            await guest.ping(GATEWAY)
            await ping_from_host(str(guest.ip))
            assert await ping_from(OUTER, guest.ip)
            for address in (GATEWAY, HOSTS, METADATA):
                for port in (22, 4222):
                    assert not await answers(guest, address, port, via=GATEWAY)
            for address in (FAR, NEXT, LAST):
                assert await answers(guest, address, 22, via=GATEWAY)
            await sync(node, of(FAR, NEXT, opened=(IPv4Network(f"{NEXT}/32"),)))
            found = [await answers(guest, each, 22, via=GATEWAY) for each in (FAR, NEXT, LAST)]
            assert found == [False, True, True]
            await sync(node, of(closed=(IPv4Network(f"{LAST}/32"),)))
            found = [await answers(guest, each, 22, via=GATEWAY) for each in (FAR, LAST)]
            assert found == [True, False]
            await sync(node, of(opened=(IPv4Network(f"{HOSTS}/32"),)))
            assert await answers(guest, HOSTS, 22, via=GATEWAY)
        await node.attachments.release(A, 1)


async def test_only_the_name_servers_that_a_guest_was_given_are_open(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    with surroundings():
        await node.attach(A, networks=("lan",))
        async with node.guest(A) as guest:
            assert not await answers(guest, GATEWAY, 53, via=GATEWAY)
        await node.attachments.release(A, 1)
        dns = {"nameservers": [str(GATEWAY)]}
        conflist(node, "lan", bridge(node, capabilities={"mac": True}, dns=dns))
        await node.attach(B, networks=("lan",))
        async with node.guest(B) as guest:
            assert await answers(guest, GATEWAY, 53, via=GATEWAY)
            assert not await answers(guest, GATEWAY, 22, via=GATEWAY)
        await node.attachments.release(B, 1)


async def test_the_table_follows_attach_release_and_restart(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    try:
        await node.attachments.tidy()
        assert TABLE not in tables()
        first = (await node.attach(A, networks=("lan",))).interfaces[0].addresses[0]
        second = (await node.attach(B, networks=("lan",))).interfaces[0].addresses[0]
        both = {address.partition("/")[0] for address in (first, second)}
        assert guests() == both
        await node.restart()
        assert guests() == both
        await node.attachments.release(A, 1)
        assert guests() == {second.partition("/")[0]}
        run(f"nft delete table inet {TABLE}")
        first = (await node.attach(A, networks=("lan",), epoch=2)).interfaces[0].addresses[0]
        assert guests() == {address.partition("/")[0] for address in (first, second)}
        await node.attachments.release(A, 2)
        node.stop()
        run(f"nft delete table inet {TABLE}")
        await node.start()
        assert guests() == {second.partition("/")[0]}
        await node.attachments.release(B, 1)
        await node.attachments.tidy()
        assert guests() == set()  # another guest may follow
        node.stop()
        assert TABLE not in tables()
        run(f"nft add table inet {TABLE}")
        await node.start()
        await node.attachments.tidy()
        assert TABLE not in tables()  # an earlier netd was killed
    finally:
        without_bridge()


async def test_the_table_goes_some_time_after_its_last_guest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_networks, "PLUGIN_TABLE_LINGER_S", 0.1)
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    node.stop()
    node.wire()
    networks = host_networks.HostNetworks(settings_on(node.host), node.doors, lambda: "held life\n")
    node.attachments = networks.attachments
    try:
        async with asyncio.timeout(60), networks.running():
            await networks.until_recovered()
            await node.attach(A, networks=("lan",))
            await asyncio.sleep(0.3)
            assert len(guests()) == 1
            await networks.attachments.release(A, 1)
            await eventually(lambda: TABLE not in tables())
            await node.attach(A, networks=("lan",), epoch=2)
            assert len(guests()) == 1
            await networks.attachments.release(A, 2)
            await eventually(lambda: TABLE not in tables())
    finally:
        without_bridge()


async def test_a_comparison_restores_rules_that_somebody_removed(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    audit = OrphanAudit(node.doors, node.attachments)
    try:
        await node.attach(A, networks=("lan",))
        assert await audit.faults() == {}
        for damage in (f"delete table inet {TABLE}", f"flush chain inet {TABLE} input"):
            run(f"nft {damage}")
            ((uid, faults),) = (await audit.faults()).items()
            assert (uid, TABLE in faults[0]) == (A, True), HOST
            await audit.mend()
            assert await audit.faults() == {}
        await node.attachments.release(A, 1)
    finally:
        without_bridge()


@pytest.mark.parametrize("kind", ["macvlan", "host-device"])
async def test_the_tap_limits_guests_whose_links_do_not_lead_to_the_host(
    node: Node, kind: str
) -> None:
    near, host = IPv4Address("10.88.0.1"), IPv4Address("10.88.0.99")
    node.reach = of(host)
    await node.restart()
    run(f"ip netns add {FAR_NETNS}")
    try:
        run(f"ip link add und0 type veth peer name und1 netns {FAR_NETNS}")
        run("ip link set und0 up")
        for address in (near, host):
            run(f"ip -n {FAR_NETNS} addr add {address}/24 dev und1")
        run(f"ip -n {FAR_NETNS} link set und1 up")
        link = {"master": "und0"} if kind == "macvlan" else {"device": "und0"}
        mac = {"capabilities": {"mac": True}}
        conflist(node, "lan", {"type": kind, **link, **mac, "ipam": host_local(node)})
        with contextlib.suppress(Exception):  # cni_mac
            await node.attach(A, networks=("lan",))
        await node.attach(A, networks=("lan",))
        async with node.guest(A) as guest:
            await guest.ping(near)
            assert await answers(guest, near, 22, via=near)
            assert not await answers(guest, host, 22, via=near)
            refused = node.counters(A).interfaces[0].refused
            assert refused["reach"] >= 1
        await node.attachments.release(A, 1)
    finally:
        subprocess.run(["ip", "link", "del", "und0"], check=False)
        run(f"ip netns del {FAR_NETNS}")
