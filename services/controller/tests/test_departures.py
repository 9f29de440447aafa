"""Drain, fence and move, with hosts that power off and return (ADR 0014, I1, I2, I15)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, uid
from services.controller.tests.hosts import Guests, Host
from services.controller.tests.test_vm_api import refused
from services.controller.tests.virtual import World, run, world

from virtbus.bus.client.memory_bus import Fault
from virtbus.bus.client.ports import EntryKind
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeDetail
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import read, validate

FREE = {"eviction_strategy": "None"}
POWERED_OFF = "the switch of its rack is off"


class Site:
    """A world with hosts."""

    def __init__(self, made: World) -> None:
        self.made = made
        self.guests = Guests()
        self.hosts: dict[str, Host] = {}

    def host(self, name: str, memory_bytes: int = 16 * GIB) -> Host:
        self.hosts[name] = Host(self.made, self.guests, name, memory_bytes)
        return self.hosts[name]

    async def vm(self, number: int, node: str, **spec: Any) -> VmRecord:
        """A VM that runs on a node."""
        request = {"name": f"vm{number}", "image": "tiny", "uid": uid(number)}
        await self.made.vm("create", **request, spec=spec)
        await self.runs_on(number, node)
        return await self.record(number)

    async def record(self, number: int) -> VmRecord:
        found = await self.made.stored(uid(number))
        assert found is not None
        return found

    async def node(self, verb: str, name: str, **data: Any) -> NodeDetail:
        answer = await self.made.ask(verb, resource="node", node=name, **data)
        return validate(NodeDetail, answer)

    async def until(self, check: Callable[[], Any], within_s: float = 120) -> None:
        async with asyncio.timeout(within_s):
            while True:
                value = check()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(0.1)

    async def runs_on(self, number: int, host: str) -> None:
        await self.until(lambda: self.guests.running.get(uid(number)) == host)

    def well(self) -> None:
        assert self.guests.wrong == []


Scenario = Callable[[Site], Awaitable[None]]


def site() -> Callable[[Scenario], Callable[[], None]]:
    """Make a scenario a test in virtual time, and check that no VM ran twice."""

    def wrap(scenario: Scenario) -> Callable[[], None]:
        def test() -> None:
            async def body() -> None:
                async with world(nodes=0) as made:
                    there = Site(made)
                    await scenario(there)
                    there.well()

            run(body)

        test.__name__ = scenario.__name__
        test.__doc__ = scenario.__doc__
        return test

    return wrap


@asynccontextmanager
async def two_hosts(there: Site) -> AsyncIterator[None]:
    """n1 runs, then n2 joins: earlier VMs are on n1."""
    async with there.host("n1").on():
        await there.until(lambda: "n1" in _nodes(there))
        yield


def _nodes(there: Site) -> dict[str, Any]:
    return next(iter(there.made.controllers.values()))._fleet.nodes


async def _joined(there: Site, name: str) -> None:
    await there.until(lambda: name in _nodes(there))


# --- drain --------------------------------------------------------------------------------


@site()
async def test_a_drained_node_s_vms_run_elsewhere_with_a_higher_epoch(there: Site) -> None:
    async with two_hosts(there):
        for number in (1, 2, 3):
            await there.vm(number, "n1", **FREE)
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            for number in (1, 2, 3):
                await there.runs_on(number, "n2")
                record = await there.record(number)
                assert (record.node, record.epoch, record.evacuating) == ("n2", 2, False)
            assert there.hosts["n1"].disks == {}
            await there.until(lambda: not _statuses(there, "n1"))
            assert (await there.node("get", "n1")).vms == ()


def _statuses(there: Site, name: str) -> list[Any]:
    fleet = next(iter(there.made.controllers.values()))._fleet
    return [key for key in fleet.statuses if key[0] == name]


@site()
async def test_a_vm_with_local_disks_stays_until_the_user_gives_them_up(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1")
        await there.vm(2, "n1", eviction_strategy="External")
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await asyncio.sleep(30)
            shown = {vm.name: vm for vm in (await there.node("get", "n1")).vms}
            assert "--discard-local-disks" in shown["vm1"].eviction_blocked_reason
            assert "External" in shown["vm2"].eviction_blocked_reason
            assert there.guests.running == {uid(1): "n1", uid(2): "n1"}
            await there.node("drain", "n1", discard_local_disks=True)
            await there.runs_on(1, "n2")
            assert there.guests.running[uid(2)] == "n1"


@site()
async def test_a_vm_leaves_only_once_another_node_has_room(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1", **FREE)
        await there.node("drain", "n1")
        await asyncio.sleep(30)
        assert there.guests.running == {uid(1): "n1"}
        (shown,) = (await there.node("get", "n1")).vms
        assert shown.eviction_blocked_reason == "no node can take it: there is no other"
        async with there.host("n2").on():
            await there.runs_on(1, "n2")


@site()
async def test_free_room_is_counted_so_no_vm_stops_for_room_that_another_takes(
    there: Site,
) -> None:
    async with two_hosts(there):
        for number in (1, 2, 3):
            await there.vm(number, "n1", domain={"memory": {"guest": GIB}}, **FREE)
        async with there.host("n2", 3 * GIB).on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.until(lambda: len(there.guests.started) >= 5)
            await asyncio.sleep(30)
            assert sorted(there.guests.running.values()) == ["n1", "n2", "n2"]


@site()
async def test_a_drain_of_a_silent_node_stops_nothing_and_names_the_next_step(there: Site) -> None:
    async with there.host("n2").on():
        async with there.host("n1").on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        (shown,) = (await there.node("drain", "n1")).vms
        assert "virtbus node fence" in shown.eviction_blocked_reason
        await asyncio.sleep(30)
        assert not (await there.record(1)).evacuating


@site()
async def test_a_vm_whose_target_is_gone_waits_and_starts_when_there_is_room(
    there: Site,
) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1", **FREE)
        n1 = there.hosts["n1"]
        n1.stuck = True
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.until(lambda: _leaving(there))
            await there.node("cordon", "n2")
            n1.stuck = False
            await n1.look(await there.record(1))
            await asyncio.sleep(20)
            assert (await there.made.vm("get", uid=uid(1))).state is VmState.PENDING
            await there.node("uncordon", "n2")
            await there.runs_on(1, "n2")


@site()
async def test_uncordon_ends_a_drain_and_leaving_vms_return(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1", **FREE)
        await there.vm(2, "n1", **FREE)
        n1 = there.hosts["n1"]
        n1.stuck = True
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.until(lambda: _leaving(there))
            await there.node("cordon", "n2")
            await there.node("uncordon", "n1")
            n1.stuck = False
            for number in (1, 2):
                await n1.look(await there.record(number))
            await there.until(lambda: not _leaving(there))
            for number in (1, 2):
                await there.runs_on(number, "n1")
                assert (await there.record(number)).epoch == 2


@site()
async def test_a_vm_that_is_deleted_while_it_leaves_is_placed_nowhere_again(there: Site) -> None:
    """Not even if the end of the delete has to be retried (L1)."""
    async with two_hosts(there):
        await there.vm(1, "n1", **FREE)
        n1 = there.hosts["n1"]
        n1.stuck = True
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.until(lambda: _leaving(there))
            await there.made.vm("delete", uid=uid(1), grace_s=0)
            fleet = next(iter(there.made.controllers.values()))._fleet
            await there.until(lambda: fleet.vms[uid(1)].record.deleting)
            bus = there.made.buses["c1"]
            bus.faults.append(Fault.UNAVAILABLE)
            n1.stuck = False
            await n1.look(await there.record(1))
            await there.until(lambda: _gone(there, 1))
            shelf = there.made.server.shelf("$KV.vm.x")
            assert subjects.vm_record("n2", uid(1)) not in shelf.entries
            assert there.guests.started == [(uid(1), "n1")]


def _leaving(there: Site) -> bool:
    return bool(next(iter(there.made.controllers.values()))._fleet.evacuating)


@site()
async def test_a_vm_that_ended_by_itself_does_not_run_again_elsewhere(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1", run_strategy="Once", **FREE)
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.until(lambda: there.hosts["n2"].disks)
            record = await there.record(1)
            assert (record.node, record.powered) == ("n2", False)
            assert uid(1) not in there.guests.running


@site()
async def test_secrets_go_with_the_vm_and_none_is_left(there: Site) -> None:
    async with two_hosts(there):
        await there.made.vm(
            "create", name="s", image="tiny", uid=uid(1), user_data="#cloud-config\n", spec=FREE
        )
        await there.runs_on(1, "n1")
        async with there.host("n2").on():
            await _joined(there, "n2")
            await there.node("drain", "n1")
            await there.runs_on(1, "n2")
            secret = await there.made.host.get(subjects.vm_secret("n2", uid(1)))
            assert secret is not None
            assert "cloudinit" in read(VmSecrets, secret.value).cloud_init
            old = await there.made.host.get(subjects.vm_secret("n1", uid(1)))
            assert old is not None
            assert old.kind is EntryKind.PURGE


# --- move ---------------------------------------------------------------------------------


@site()
async def test_a_vm_moves_to_the_node_that_was_named_and_back(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1")
        async with there.host("n2").on(), there.host("n3").on():
            await _joined(there, "n3")
            for epoch, goal in enumerate(("n3", "n1", "n3", "n2"), start=2):
                await there.made.ask("move", uid=uid(1), discard_local_disks=True, to=goal)
                await there.runs_on(1, goal)
                assert (await there.record(1)).epoch == epoch


@site()
async def test_an_impossible_move_is_refused_before_anything_stops(there: Site) -> None:
    async with two_hosts(there):
        await there.vm(1, "n1")
        refusals: list[tuple[dict[str, Any], str]] = [
            ({}, "local_disks"),
            ({"discard_local_disks": True}, "no_capacity"),
            ({"discard_local_disks": True, "to": "n9"}, "no_capacity"),
        ]
        for data, reason in refusals:
            error = await refused(there.made.ask("move", uid=uid(1), **data))
            assert error.reason == reason
        assert there.guests.started == [(uid(1), "n1")]


async def _gone(there: Site, number: int) -> bool:
    return await there.made.stored(uid(number)) is None


@pytest.mark.parametrize("controllers", [1, 2])
def test_a_restarted_controller_continues(controllers: int) -> None:
    async def body() -> None:
        async with world(nodes=0, controllers=controllers) as made:
            there = Site(made)
            async with two_hosts(there):
                await there.vm(1, "n1", **FREE)
                n1 = there.hosts["n1"]
                n1.stuck = True
                async with there.host("n2").on():
                    await _joined(there, "n2")
                    await there.node("drain", "n1")
                    await there.until(lambda: _leaving(there))
                    made.buses["c1"].disconnect()
                    await asyncio.sleep(60)
                    made.buses["c1"].reconnect()
                    await asyncio.sleep(5)
                    n1.stuck = False
                    await n1.look(await there.record(1))
                    await there.runs_on(1, "n2")
                    there.well()

    run(body)
