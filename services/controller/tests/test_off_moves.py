"""A volume moves while its VM is off, and no guest ever runs on the copy that is left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.controller.tests.fleets import status, uid
from services.controller.tests.off_hosts import OffHosts, with_vm
from services.controller.tests.schedules import Gates, Scenario, ScheduledBus, explore
from services.controller.tests.test_departures_broken import (
    SOURCES,
    MortalBus,
    _declared,
    virtual_ns,
)
from services.controller.tests.test_older_backups import copied, restored
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import DATA, at, holder
from services.controller.tests.virtual import World, run, world_on
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import powered
from virtbus.controller.core.vm_keys import StoredVm, StoredVolume
from virtbus.controller.core.volume_moves import Goal, begun
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.off_moves import OffMoves
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.states import VmState
from virtbus.schemas.volume import VolumeState
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import encode, validate

FULL = VirtbusError(Code.UNAVAILABLE, "disk_full", "the disk is full").body


async def move(made: World, name: str = "data", **goal: str) -> VolumeView:
    return validate(VolumeView, await made.ask("move", "volume", name=name, **goal))


async def get(made: World, name: str = "data") -> VolumeView:
    return validate(VolumeView, await made.ask("get", "volume", name=name))


# --- another pool ----------------------------------------------------------------------------
@played()
async def test_a_volume_of_a_vm_that_is_off_goes_to_another_pool(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        before = await with_vm(hosts, "data", own_disk=True)
        hosts.held_back = {"data"}
        view = await move(made, pool="fast")
        assert (view.state, view.holder, view.spec.pool) == (VolumeState.MOVING, uid(1), "local")
        assert await move(made, pool="fast") == view, "a repeat changes nothing"
        assert (await hosts.vm()).generation == before.generation
        hosts.held_back = set()
        await hosts.idle("data")
        view = await get(made)
        assert (view.state, view.holder, view.spec.pool) == (VolumeState.IN_USE, uid(1), "fast")
        assert view.message == ""
        after = await hosts.vm()
        ref = after.volume_refs["disk-data"]
        assert (ref.pool, ref.copied, after.node, after.epoch) == ("fast", True, "n1", before.epoch)
        assert after.generation > before.generation
        await hosts.well("data")
        await made.ask("start", uid=uid(1))
        await asyncio.sleep(2)
        assert ("n1", "fast", "data") in hosts.written


@pytest.mark.parametrize("kind", [PoolKind.BLOCK, PoolKind.LVM])
def test_a_volume_of_a_vm_that_is_off_goes_to_a_device_and_back(kind: PoolKind) -> None:
    @played()
    async def scenario(made: World) -> None:
        hosts = OffHosts(made, kind=kind)
        async with hosts.on():
            await with_vm(hosts, "data", own_disk=True)
            for goal, there in (("fast", kind), ("local", PoolKind.LOCAL)):
                await move(made, pool=goal)
                await hosts.idle("data")
                ref = (await hosts.vm()).volume_refs["disk-data"]
                assert (ref.pool, ref.kind, ref.copied) == (goal, there, True)
                record = await hosts.volume()
                assert record is not None
                assert (record.spec.pool, record.pool_kind, record.holder) == (goal, there, uid(1))
                await hosts.well("data")
                await made.ask("start", uid=uid(1))
                await asyncio.sleep(2)
                assert ("n1", goal, "data") in hosts.written
                await made.ask("stop", uid=uid(1))
                await asyncio.sleep(2)

    scenario()


@pytest.mark.parametrize("kind", [PoolKind.BLOCK, PoolKind.LVM])
def test_a_vm_that_is_off_goes_to_devices_of_another_node_and_back(kind: PoolKind) -> None:
    @played()
    async def scenario(made: World) -> None:
        hosts = OffHosts(made, kind=kind)
        async with hosts.on():
            before = await with_vm(hosts, "data", "logs")
            await move(made, node="n2", pool="fast")
            await hosts.idle("data", "logs")
            places = {name: (await get(made, name)).spec.pool for name in ("data", "logs")}
            after = await hosts.vm()
            assert (after.node, after.epoch) == ("n2", before.epoch + 1)
            assert places == {"data": "fast", "logs": "local"}, "the others stay in their pools"
            await hosts.well("data", "logs")
            await move(made, node="n1", pool="local")
            await hosts.idle("data", "logs")
            assert (await hosts.vm()).node == "n1"
            await hosts.well("data", "logs")
            await made.ask("start", uid=uid(1))
            await asyncio.sleep(2)
            assert ("n1", "local", "data") in hosts.written

    scenario()


@played()
async def test_no_start_and_no_restore_while_a_volume_moves(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        vm = await with_vm(hosts, "data", own_disk=True)
        hosts.held_back = {"data"}
        await move(made, pool="fast")
        for _ in range(2):
            error = await refused(made.ask("start", uid=uid(1)))
            assert (error.code, error.reason) == (409, "volume_moving")
            assert "to the pool fast" in str(error)
            assert "volume move data -n default --node n1 --pool local` gives" in str(error)
            await asyncio.sleep(5)
        spec = vm.spec.model_dump(mode="json", exclude_defaults=True) | {"run_strategy": "Always"}
        for strategy in ("Manual", "Always"):
            spec["run_strategy"] = strategy
            view = await made.vm("get", uid=uid(1))
            asked = made.vm("update", uid=uid(1), revision=view.revision, spec=spec)
            if strategy == "Always":
                assert (await refused(asked)).reason == "volume_moving"
            else:
                await asked
        asked = made.ask("create", "snapshot", name="s", vm="web")
        assert (await refused(asked)).reason == "volume_moving"
        assert (await refused(made.ask("flatten", "operation", vm="web"))).reason == "volume_moving"
        await move(made, pool="local", node="n1")
        assert "given up" in (await get(made)).message
        await made.ask("start", uid=uid(1))
        hosts.held_back = set()
        await hosts.idle("data")
        await hosts.well("data")
        assert (await get(made)).spec.pool == "local"


@played()
async def test_a_vm_that_is_not_off_keeps_its_volume_where_it_is(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        await with_vm(hosts, "data", own_disk=True)
        await made.ask("start", uid=uid(1))
        await asyncio.sleep(2)
        error = await refused(move(made, pool="fast"))
        assert (error.code, error.reason) == (409, "volume_in_use")
        assert "`virtbus vm stop web -n default`" in str(error)
        assert (await refused(move(made, node="n2"))).reason == "volume_in_use"
        assert (await get(made)).state == VolumeState.IN_USE
        await move(made, node="n1", pool="local")


@played()
async def test_a_snapshot_of_the_vm_that_is_open_refuses_the_begin(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        await with_vm(hosts, "data", own_disk=True)
        hosts.held_back = {"web"}
        await made.ask("create", "snapshot", name="s", vm="web")
        error = await refused(move(made, pool="fast"))
        assert (error.reason, "operation watch" in str(error)) == ("operation_open", True)


@played()
async def test_a_failure_between_pools_leaves_volume_and_vm_as_they_were(made: World) -> None:
    hosts = OffHosts(made, failing={"data": FULL})
    async with hosts.on():
        before = await with_vm(hosts, "data", own_disk=True)
        await move(made, pool="fast")
        await hosts.idle("data")
        view = await get(made)
        assert view.message == "the move to the pool fast failed: the disk is full"
        assert (await hosts.vm()).volume_refs == before.volume_refs
        await made.ask("start", uid=uid(1))


@played()
async def test_a_bus_older_than_a_move_between_pools_removes_no_only_copy(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        await with_vm(hosts, "data", own_disk=True)
        hosts.held_back = {"data"}
        await move(made, pool="fast")
        backup = copied(made)
        hosts.held_back = set()
        await hosts.idle("data")
        assert hosts.data == {("n1", "fast", "data")}
        await restored(made, backup)
        await hosts.idle("data")
        assert "the move to the pool fast failed" in (await get(made)).message
        assert hosts.data == {("n1", "fast", "data")}


@played()
async def test_a_volume_that_loses_its_vm_meanwhile_goes_alone(made: World) -> None:
    hosts = OffHosts(made, held_back={"data", "other"})
    async with hosts.on():
        await with_vm(hosts, "data", "other")
        await move(made, pool="fast")
        await made.ask("detach", "volume", name="data")
        hosts.held_back = set()
        await hosts.idle("data")
        view = await get(made)
        assert (view.state, view.spec.pool) == (VolumeState.BOUND, "fast")
        await hosts.well("data", "other")


def test_a_start_and_a_begin_exclude_each_other_in_each_order() -> None:
    ends = set()

    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        data = volume(9, node="n1", bound=True, holder=uid(1))
        bus = MemoryBus(server)
        await bus.put(DATA, encode(data))
        off = holder(1, data).model_copy(update={"powered": False})
        await bus.put(subjects.vm_record("n1", uid(1)), encode(off))

        def parts(name: str) -> tuple[OffMoves, Commits, VolumeWrites]:
            own = ScheduledBus(server, name, gates)
            fleet = Fleet()
            return OffMoves(own, fleet, FleetEvents(own)), Commits(own, fleet), VolumeWrites(own)

        async def start() -> None:
            moves, commits, _ = parts("start")
            held = await commits.latest(uid(1))
            assert held is not None
            after = powered(held.record, on=True)
            await moves.refuse_start(held.record, after)
            await commits.replace(held, after)

        async def begin() -> None:
            moves, _, volumes = parts("begin")
            there = await volumes.latest("default", "data")
            assert there is not None
            vm = await moves.holder(there.record)
            assert vm is not None
            if not vm.record.powered:
                goal = Goal("n1", "fast")
                moving = begun(there.record, goal, uid(50), uid(51), is_off=True)
                await moves.begin(vm, [StoredVolume(moving, there.revision)])

        await gates.run({"start": start(), "begin": begin()})
        vm = (await Commits(bus).latest(uid(1)) or StoredVm(off, 0)).record
        moved = (await at(bus)).is_moving
        assert not (vm.powered and moved), "a guest would write to the copy that is left behind"
        ends.add((vm.powered, moved))

    run(lambda: _explored(scenario))
    assert ends >= {(True, False), (False, True)}


async def _explored(scenario: Scenario) -> None:
    await explore(scenario, pauses=4)


# --- another node ----------------------------------------------------------------------------
@played()
async def test_a_vm_that_is_off_goes_to_another_node_with_all_its_volumes(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        before = await with_vm(hosts, "data", "logs")
        hosts.held_back = {"logs"}
        view = await move(made, node="n2")
        assert (view.state, view.moving_to) == (VolumeState.MOVING, "n2")
        other = await get(made, "logs")
        assert (other.state, other.moving_to) == (VolumeState.MOVING, "n2")
        assert (await refused(made.ask("start", uid=uid(1)))).reason == "volume_moving"
        await asyncio.sleep(20)
        assert ((await get(made)).node, (await hosts.vm()).node) == ("n1", "n1"), "all or nothing"
        hosts.held_back = set()
        await hosts.idle("data", "logs")
        after = await hosts.vm()
        assert (after.node, after.epoch, after.powered) == ("n2", before.epoch + 1, False)
        for name in ("data", "logs"):
            view = await get(made, name)
            assert (view.node, view.holder, view.state) == ("n2", uid(1), VolumeState.IN_USE)
        await hosts.well("data", "logs")
        await made.ask("start", uid=uid(1))
        await asyncio.sleep(2)
        assert ("n2", "local", "logs") in hosts.written


@played()
async def test_a_failure_of_one_volume_leaves_the_vm_with_all_of_them(made: World) -> None:
    hosts = OffHosts(made, failing={"logs": FULL})
    async with hosts.on():
        before = await with_vm(hosts, "data", "logs")
        await move(made, node="n2")
        await hosts.idle("data", "logs")
        assert (await get(made, "logs")).message == "the move to n2 failed: the disk is full"
        view = await get(made)
        assert "logs, another volume of web, does not go along: the disk is full" in view.message
        after = await hosts.vm()
        assert (after.node, after.volume_refs) == ("n1", before.volume_refs)
        hosts.failing = {}
        await move(made, node="n2")
        await hosts.idle("data", "logs")
        await hosts.well("data", "logs")
        assert (await hosts.vm()).node == "n2"


@played()
async def test_one_volume_that_is_given_up_keeps_all_of_them(made: World) -> None:
    hosts = OffHosts(made, held_back={"data", "logs"})
    async with hosts.on():
        await with_vm(hosts, "data", "logs")
        await move(made, node="n2")
        await move(made, "logs", node="n1")
        hosts.held_back = set()
        await hosts.idle("data", "logs")
        assert (await hosts.vm()).node == "n1"
        await hosts.well("data", "logs")


@played()
async def test_a_deleted_vm_leaves_its_volumes_to_go_alone(made: World) -> None:
    hosts = OffHosts(made, held_back={"data", "logs"})
    async with hosts.on():
        vm = await with_vm(hosts, "data", "logs")
        await move(made, node="n2")
        await made.ask("delete", uid=uid(1))
        hosts.held_back = set()
        await asyncio.sleep(20)
        assert (await get(made)).node == "n1", "its VM is not gone yet"
        await made.say(status(vm, released=True))
        await hosts.idle("data", "logs")
        assert [(await get(made, one)).node for one in ("data", "logs")] == ["n2", "n2"]
        assert [(await get(made, one)).holder for one in ("data", "logs")] == ["", ""]
        await hosts.well("data", "logs")


@played()
async def test_a_vm_with_disks_of_its_own_stays_with_the_next_step(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        await with_vm(hosts, "data", own_disk=True)
        error = await refused(move(made, node="n2"))
        assert (error.code, error.reason) == (409, "local_disks")
        assert "--from-vm web:" in str(error)
        await made.ask("cordon", "node", node="n2")
        assert (await refused(move(made, node="n9"))).code == 404
        assert (await get(made)).state == VolumeState.IN_USE


@played()
async def test_a_vm_whose_own_disks_may_be_lost_goes(made: World) -> None:
    hosts = OffHosts(made)
    async with hosts.on():
        await with_vm(hosts, "data", own_disk=True, eviction_strategy="None")
        await made.ask("cordon", "node", node="n2")
        error = await refused(move(made, node="n2"))
        assert (error.code, error.reason) == (429, "no_capacity")
        await made.ask("uncordon", "node", node="n2")
        await move(made, node="n2", pool="fast")
        await hosts.idle("data")
        assert (await get(made)).spec.pool == "fast"
        await hosts.well("data")


@played()
async def test_a_move_is_not_given_up_once_the_vm_leaves_its_node(made: World) -> None:
    hosts = OffHosts(made, stuck=True)
    async with hosts.on():
        await with_vm(hosts, "data", "logs")
        await move(made, node="n2")
        while not (await hosts.vm()).evacuating:
            await asyncio.sleep(0.5)
        for name in ("data", "logs"):
            error = await refused(move(made, name, node="n1"))
            assert (error.reason, "complete on n2" in str(error)) == ("volume_moving", True)
        assert (await refused(made.ask("start", uid=uid(1)))).reason == "volume_moving"
        await asyncio.sleep(10)
        assert (await hosts.vm()).node == "n1", "its node has not released it"
        hosts.stuck = False
        await hosts.idle("data", "logs")
        assert (await hosts.vm()).node == "n2"
        await hosts.well("data", "logs")


@played()
async def test_a_vm_that_was_released_for_nothing_stays_on_its_node(made: World) -> None:
    hosts = OffHosts(made, stuck=True)
    async with hosts.on():
        before = await with_vm(hosts, "data", "logs")
        await move(made, node="n2")
        while not (await hosts.vm()).evacuating:
            await asyncio.sleep(0.5)
        one = await hosts.volume("logs")
        assert one is not None
        assert one.move is not None
        await made.ask("delete", "operation", id=one.move.fill)
        await hosts.idle("data", "logs")
        hosts.stuck = False
        await asyncio.sleep(10)
        after = await hosts.vm()
        assert (after.node, after.epoch, after.evacuating) == ("n1", before.epoch + 1, False)
        assert after.volume_refs == before.volume_refs
        await made.ask("start", uid=uid(1))
        await asyncio.sleep(2)
        await hosts.well("data", "logs")


@played()
async def test_a_fenced_source_needs_no_release(made: World) -> None:
    hosts = OffHosts(made, stuck=True)
    async with hosts.on():
        await with_vm(hosts, "data")
        await move(made, node="n2")
        while not (await hosts.vm()).evacuating:
            await asyncio.sleep(0.5)
        hosts.silent = {"n1"}
        await asyncio.sleep(40)
        assert (await hosts.vm()).node == "n1"
        await made.ask("fence", "node", node="n1", confirm="powered off")
        await asyncio.sleep(15)
        assert (await hosts.vm()).node == "n2"
        assert (await get(made)).node == "n2"
        await made.ask("start", uid=uid(1))


@played()
async def test_other_vms_leave_a_fenced_node_on_which_one_stays_with_its_volumes(
    made: World,
) -> None:
    hosts = OffHosts(made, stuck=True)
    async with hosts.on():
        await with_vm(hosts, "data")
        await made.ask("cordon", "node", node="n2")
        free = {"eviction_strategy": "None"}
        await made.vm("create", name="free", image="tiny", uid=uid(2), spec=free)
        assert (await hosts.vm(2)).node == "n1"
        await made.ask("uncordon", "node", node="n2")
        await move(made, node="n2")
        while not (vm := await hosts.vm()).evacuating:
            await asyncio.sleep(0.5)
        one = await hosts.volume()
        assert one is not None
        assert one.move is not None
        hosts.silent = {"n1"}
        await made.ask("delete", "operation", id=one.move.fill)
        await asyncio.sleep(40)
        await made.ask("fence", "node", node="n1", confirm="powered off")
        await made.vm("create", name="new", image="tiny")
        await made.say(status(vm, VmState.STOPPED, released=True))
        await asyncio.sleep(15)
        assert ((await hosts.vm()).node, (await hosts.vm(2)).node) == ("n1", "n2")


@played()
async def test_another_volume_that_was_attached_meanwhile_stops_the_move(made: World) -> None:
    hosts = OffHosts(made, held_back={"data"})
    async with hosts.on():
        await with_vm(hosts, "data")
        await made.ask("create", "volume", name="late", spec={"size": "1GiB"}, node="n1")
        await move(made, node="n2")
        await made.ask("attach", "volume", name="late", vm="web")
        hosts.held_back = set()
        await hosts.idle("data")
        assert "late, another volume of web, does not go along" in (await get(made)).message
        assert (await hosts.vm()).node == "n1"


# --- deaths ----------------------------------------------------------------------------------
Story = Callable[[OffHosts], Awaitable[None]]


async def persistent(made: World, verb: str, resource: str, **data: Any) -> Any:
    """Ask like a client, which repeats a request without an answer."""
    while True:
        try:
            return await made.ask(verb, resource, **data)
        except BusError:
            await asyncio.sleep(0.5)
        except VirtbusError as error:
            if error.body.retry is Retry.NEVER and error.reason != "volume_moving":
                raise
            await asyncio.sleep(0.5)


async def killed_at(at: int, *, behind: bool, goal: dict[str, str], names: tuple[str, ...]) -> bool:
    """Move; the first controller dies at its write `at`. Return False if it made fewer."""
    async with world_on(MemoryServer(virtual_ns), controllers=0, nodes=0) as made:
        bus = MortalBus(made.server, at, behind=behind)
        async with background() as tasks:
            first = tasks.start(ControllerService(bus, Settings(), _declared).run())
            await asyncio.sleep(1)  # it holds the lease
            other = ControllerService(MemoryBus(made.server, "c2", SOURCES), Settings(), _declared)
            tasks.start(other.run())

            async def bury() -> None:
                await bus.dead.wait()
                bus.disconnect()
                first.cancel()

            tasks.start(bury())
            hosts = OffHosts(made)
            async with hosts.on():
                await with_vm(hosts, *names)
                bus.arm()
                await persistent(made, "move", "volume", name="data", **goal)
                await persistent(made, "start", "vm", uid=uid(1))
                await hosts.idle(*names)
                await asyncio.sleep(5)
                await hosts.well(*names)
                view = await get(made)
                assert view.message == ""
                there = {"node": view.node, "pool": view.spec.pool}
                assert there | goal == there
                before = {("n1", "local", name) for name in names}
                assert hosts.written - before <= hosts.data, "a guest runs on the new copy only"
        return bus.dead.is_set()


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("goal", "names"), [({"pool": "fast"}, ("data",)), ({"node": "n2"}, ("data", "logs"))]
)
def test_a_move_survives_the_death_of_a_controller_at_each_write(
    goal: dict[str, str], names: tuple[str, ...], *, behind: bool
) -> None:
    async def body() -> None:
        at = 1
        while await killed_at(at, behind=behind, goal=goal, names=names):
            at += 1
        assert at >= 5

    run(body)
