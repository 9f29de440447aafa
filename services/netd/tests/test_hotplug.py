"""Interfaces that are plugged into a running guest's network, and removed from it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Node, eventually, make_record
from services.netd.tests.test_filters import forbidden

from virtbus.netd.core.hotplug import grown
from virtbus.netd.core.names import host_link, lent_tap
from virtbus.netd.core.plan import plan_of
from virtbus.netd.edge import links
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.taps import open_tap
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import PlugState
from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node_rpc import NetReady

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
GATEWAY = IPv4Address("10.127.0.1")
TWO = ("default", "default")


async def step(node: Node, do: Any, name: str = "net1") -> NicDone:
    return await node.attachments.change_nic(NicWork(uid=A, epoch=1, name=name, do=do))


async def refused(node: Node, do: Any, name: str = "net1") -> str:
    with pytest.raises(VirtbusError) as error:
        await step(node, do, name)
    return error.value.reason


def plugs(ready: NetReady) -> dict[str, str]:
    return {one.name: str(one.plug) for one in ready.interfaces}


def exists(link: str) -> bool:
    with Netlink() as host:
        return links.find(host, link) is not None


@asynccontextmanager
async def plugged(node: Node, generation: int = 2) -> AsyncIterator[Guest]:
    """A second interface as QEMU has it: its tap was opened where libvirt opens it."""
    ready = await node.attach(A, networks=TWO, generation=generation)
    assert plugs(ready)["net1"] == PlugState.WAITING
    lent = await step(node, "lend")
    fd = open_tap(lent.tap)
    await step(node, "join")
    ready = await node.attach(A, networks=TWO, generation=generation)
    assert set(plugs(ready).values()) == {PlugState.PLUGGED}
    nic = ready.interfaces[1]
    guest = Guest(fd, nic.mac, nic.addresses[0])
    try:
        yield guest
    finally:
        guest.close()


async def drop(node: Node, generation: int) -> NetReady:
    """The record has one interface, and QEMU has released the other."""
    leaving = await node.attach(A, generation=generation)
    assert plugs(leaving)["net1"] == PlugState.LEAVING
    await step(node, "drop")
    return await node.attach(A, generation=generation)


@pytest.mark.integration
async def test_an_interface_joins_a_running_guest_carries_traffic_and_leaves(node: Node) -> None:
    first = await node.attach(A)
    async with node.guest(A) as cold:
        for generation in (2, 4):
            async with plugged(node, generation) as hot:
                assert not exists(lent_tap(A, 1))
                await hot.ping(GATEWAY)
                await hot.ping(cold.ip, via=None)
                for frame in forbidden(hot).values():
                    hot.send(frame.ljust(60, b"\0"))
                assert await node.attachments.compare() == []
                await node.restart()
                assert await node.attachments.compare() == []
                await hot.ping(GATEWAY)
                leaving = await node.attach(A, generation=generation + 1)
                assert plugs(leaving) == {"net0": "plugged", "net1": "leaving"}
                assert await refused(node, "drop") == "tap_busy"
                await hot.ping(GATEWAY)
            assert await node.attachments.compare() == [], "the device is gone, the link is not"
            after = await drop(node, generation + 1)
            assert after.interfaces == first.interfaces
            assert not exists(host_link(A, 1))
            assert "tap1" not in node.inside(A, "ip link show")
        await cold.ping(GATEWAY)


@pytest.mark.integration
async def test_each_step_survives_a_netd_that_dies_before_and_after_it(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as cold:
        waiting = await node.attach(A, networks=TWO, generation=2)
        for _death in range(2):
            await node.restart()
            assert await node.attachments.compare() == []
            again = await node.attach(A, networks=TWO, generation=2)
            assert plugs(again) == plugs(waiting)
            await step(node, "lend")
        lent = await step(node, "lend")
        await node.restart()
        assert exists(lent.tap)
        fd = open_tap(lent.tap)
        await node.restart()
        assert await node.attachments.compare() == []
        for _death in range(2):
            await step(node, "join")
            await node.restart()
        ready = await node.attach(A, networks=TWO, generation=2)
        nic = ready.interfaces[1]
        assert (nic.mac, len(nic.addresses)) == (lent.mac, 1)
        hot = Guest(fd, nic.mac, nic.addresses[0])
        await hot.ping(GATEWAY)
        await node.attach(A, generation=3)
        await node.restart()
        hot.close()
        await node.restart()
        for _death in range(2):
            await step(node, "drop")
            await node.restart()
        assert plugs(await node.attach(A, generation=3)) == {"net0": "plugged"}
        await cold.ping(GATEWAY)


@pytest.mark.integration
async def test_a_first_interface_has_another_number_if_an_earlier_one_is_unplugged(
    node: Node,
) -> None:
    await node.attach(A, networks=TWO)
    _, taps = await node.attachments.take_taps(A, 5.0)
    record = make_record(A, networks=TWO, generation=2)
    second = record.spec.model_copy(
        update={
            "networks": record.spec.networks[1:],
            "domain": record.spec.domain.model_copy(
                update={
                    "devices": record.spec.domain.devices.model_copy(
                        update={"interfaces": record.spec.domain.devices.interfaces[1:]}
                    )
                }
            ),
        }
    )
    shorter = record.model_copy(update={"spec": second})
    before = await node.attachments.ensure(shorter)
    assert plugs(before) == {"net1": "plugged", "net0": "leaving"}
    os.close(taps[0])
    await step(node, "drop", "net0")
    (left,) = (await node.attachments.ensure(shorter)).interfaces
    assert (left.name, left.tap) == ("net1", "tap1")
    assert left.mac == before.interfaces[0].mac
    os.close(taps[1])
    await eventually(lambda: not _carrier(node))
    renewed = await node.attachments.ensure(
        shorter.model_copy(update={"generation": 3, "epoch": 2})
    )
    assert renewed.interfaces[0].mac == left.mac, "the next start has the same MAC and address"
    assert renewed.interfaces[0].addresses == left.addresses


def _carrier(node: Node) -> bool:
    return "NO-CARRIER" not in node.inside(A, "ip link show tap1")


@pytest.mark.integration
async def test_a_guest_that_ends_meanwhile_gets_all_interfaces_at_its_next_start(
    node: Node,
) -> None:
    await node.attach(A)
    async with node.guest(A):
        await node.attach(A, networks=TWO, generation=2)
        lent = await step(node, "lend")
    ready = await node.attach(A, networks=TWO, generation=2)
    assert plugs(ready) == {"net0": "plugged", "net1": "plugged"}
    assert not exists(lent.tap)
    async with node.guest(A, index=1) as second:
        await second.ping(GATEWAY)


@pytest.mark.integration
async def test_nothing_stays_of_the_last_interface(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A):
        bare = await node.attach(A, networks=(), generation=2)
        assert plugs(bare) == {"net0": "leaving"}
        assert await refused(node, "drop", "net0") == "tap_busy"
    await step(node, "drop", "net0")
    await node.attachments.tidy()
    assert not exists("virtbus0")
    assert (await node.attach(A, networks=(), generation=2)).interfaces == ()
    await node.attach(A, generation=3)
    await node.attach(A, networks=(), generation=4)
    await node.restart()
    assert node.attachments.resources() == {}
    await node.attachments.tidy()
    assert not exists("virtbus0")


@pytest.mark.integration
async def test_a_release_takes_a_lent_tap_along(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A):
        await node.attach(A, networks=TWO, generation=2)
        lent = await step(node, "lend")
        assert exists(lent.tap)
        assert await node.attachments.release(A, 1)
    assert not exists(lent.tap)


@pytest.mark.integration
async def test_a_join_without_its_tap_and_an_unknown_interface_are_refused(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A):
        await node.attach(A, networks=TWO, generation=2)
        assert await refused(node, "join") == "tap_lost"
        assert await refused(node, "lend", "net7") == "nic_unknown"
        assert await refused(node, "lend", "net0") == "tap_busy"
        assert (await step(node, "drop", "net7")).name == "net7"


def test_an_interface_waits_for_another_of_its_name_and_for_a_free_number() -> None:
    known = plan_of(make_record(A, networks=("default",) * NICS_MAX))
    other = make_record(A, networks=("lan",), generation=2)
    after = grown(known, plan_of(other))
    assert [(nic.name, nic.leaving) for nic in after.nics] == [
        (f"net{n}", True) for n in range(NICS_MAX)
    ]
    back = grown(after, plan_of(make_record(A, networks=("default",) * NICS_MAX, generation=3)))
    assert not back.changing
    fewer = known.with_nics(known.nics[1:])
    added = grown(fewer, plan_of(make_record(A, networks=("default",) * NICS_MAX, generation=2)))
    (new,) = [nic for nic in added.nics if nic.pending]
    assert (new.name, new.index, new.host_link) == ("net0", 0, host_link(A, 0))
    late = plan_of(make_record(A, generation=1))
    assert grown(added.model_copy(update={"generation": 2}), late).nics == added.nics
