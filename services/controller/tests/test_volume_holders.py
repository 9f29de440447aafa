"""A volume has one holder, from the commit of its VM to its end, on the node of its data."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, record, uid
from services.controller.tests.schedules import Gates, ScheduledBus, broken_everywhere, sample
from services.controller.tests.test_departures import Site, site
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world
from services.controller.tests.volumes import tried, volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Entry, EntryKind, Request, ServiceInfo
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import VolumeRelease, VolumeReleased
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.vm import VmRecord, Volume
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.volume_ref import NamedVolume
from virtbus.schemas.wire import encode, read, validate

DATA = subjects.volume_record("default", "data")


def using(*names: str) -> dict[str, Any]:
    return {"volumes": [{"name": f"disk-{name}", "volume": {"name": name}} for name in names]}


def holder(number: int, of: VolumeRecord, node_id: str = "n1") -> VmRecord:
    """The record of a VM that names a volume, as a controller makes it."""
    one = record(number, f"vm{number}", node=node_id)
    disk = Volume(name="data", volume=NamedVolume(name=of.name))
    spec = one.spec.model_copy(update={"volumes": (*one.spec.volumes, disk)})
    return one.model_copy(update={"spec": spec, "volume_refs": {"data": ref_of(of)}})


async def at(bus: MemoryBus, key: str = DATA) -> VolumeRecord:
    entry = await bus.get(key)
    assert entry is not None
    return read(VolumeRecord, entry.value)


async def make(made: World, name: str = "data", **more: Any) -> VolumeView:
    asked = {"name": name, "spec": {"size": "1GiB"}} | more
    return validate(VolumeView, (await made.ask("create", "volume", **asked))["volume"])


async def shown(made: World, name: str = "data") -> VolumeView:
    return validate(VolumeView, await made.ask("get", "volume", name=name))


async def vm(made: World, number: int, *names: str, **more: Any) -> VmRecord:
    asked = {"name": f"vm{number}", "image": "tiny", "uid": uid(number), "spec": using(*names)}
    await made.ask("create", **asked | more)
    found = await made.stored(uid(number))
    assert found is not None
    return found


# --- create ----------------------------------------------------------------------------------
@played()
async def test_a_vm_holds_its_volume_on_its_node(made: World) -> None:
    await make(made)
    one = await vm(made, 1, "data")
    ref = one.volume_refs["disk-data"]
    assert (ref.name, ref.size_bytes, one.spec.domain.devices.disks[1].name) == (
        "data",
        GIB,
        "disk-data",
    )
    view = await shown(made)
    assert (view.state, view.node, view.holder_name) == ("InUse", "n1", "vm1")
    again = await made.ask("create", name="vm1", image="tiny", uid=uid(1), spec=using("data"))
    assert not again.get("created", False)


@played()
async def test_a_second_vm_is_refused_with_the_holder(made: World) -> None:
    await make(made)
    await vm(made, 1, "data")
    error = await refused(vm(made, 2, "data"))
    assert (error.reason, uid(1) in str(error)) == ("volume_in_use", True)
    assert await made.stored(uid(2)) is None
    assert (await vm(made, 3)).name == "vm3"
    assert (await made.ask("create", name="vm2", image="tiny", uid=uid(4)))["created"]


@played()
async def test_volumes_that_cannot_be_used_are_refused_by_name(made: World) -> None:
    await make(made)
    missing = await refused(vm(made, 1, "nothing"))
    assert (missing.code, missing.reason) == (404, "volume_not_found")
    twice = await refused(vm(made, 1, spec={"volumes": using("data")["volumes"] * 2}))
    assert twice.code == 400
    same = [{"name": name, "volume": {"name": "data"}} for name in ("a", "b")]
    error = await refused(vm(made, 1, spec={"volumes": same}))
    assert error.body.details[0].path == "spec.volumes[1].volume.name"
    both = {"name": "a", "volume": {"name": "data"}, "empty_disk": {"capacity": "1GiB"}}
    assert (await refused(vm(made, 1, spec={"volumes": [both]}))).code == 400
    other = await refused(vm(made, 1, "data", namespace="shop"))
    assert other.reason == "volume_not_found"
    assert (await at(made.host)).holder == ""


@played()
async def test_a_volume_is_not_attached_or_detached_by_an_update(made: World) -> None:
    await make(made)
    await vm(made, 1, "data")
    view = await made.vm("get", uid=uid(1))
    spec = view.spec.model_dump(mode="json")
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] != "disk-data"]
    error = await refused(made.vm("update", uid=uid(1), revision=view.revision, spec=spec))
    assert error.reason == "immutable"


# --- placement -------------------------------------------------------------------------------
@played(nodes=3)
async def test_a_volume_draws_its_vm_to_its_node(made: World) -> None:
    await make(made, node="n2")
    assert (await vm(made, 1, "data")).node == "n2"
    await make(made, "other", node="n3")
    error = await refused(vm(made, 2, "other", "more"))
    assert error.reason == "volume_not_found"
    await make(made, "more", node="n1")
    error = await refused(vm(made, 2, "other", "more"))
    assert error.reason == "volumes_apart"
    assert {"other on n3", "more on n1"} <= set(str(error).split(": ")[1].split(";")[0].split(", "))


@played(nodes=2)
async def test_a_vm_waits_for_the_node_of_its_volume_and_says_so(made: World) -> None:
    await make(made, node="n2")
    await made.ask("cordon", "node", node="n2")
    one = await vm(made, 1, "data")
    assert (one.node, (await at(made.host)).holder) == ("_", uid(1))
    message = (await made.vm("get", uid=uid(1))).message
    assert "does not have the volume data, which is on n2" in message
    await made.ask("uncordon", "node", node="n2")
    for name in ("n1", "n2"):
        await made.hear(node(name))
    await asyncio.sleep(3)
    stored = await made.stored(uid(1))
    assert stored is not None
    assert stored.node == "n2"
    assert (await shown(made)).state == "InUse"


@played()
async def test_a_waiting_vm_takes_its_new_volume_to_its_node(made: World) -> None:
    await make(made)
    await made.ask("cordon", "node", node="n1")
    await vm(made, 1, "data")
    assert ((await at(made.host)).node, (await at(made.host)).bound) == ("", False)
    await made.ask("uncordon", "node", node="n1")
    await made.hear(node("n1"))
    await asyncio.sleep(3)
    assert ((await at(made.host)).node, (await at(made.host)).bound) == ("n1", True)


# --- the end, moves --------------------------------------------------------------------------
@site()
async def test_a_volume_is_free_after_its_vm_was_released_and_not_earlier(there: Site) -> None:
    async with there.host("n1").on():
        await there.until(lambda: _known(there, "n1"))
        await make(there.made)
        await there.vm(1, "n1", **using("data"))
        there.hosts["n1"].stuck = True
        await there.made.vm("delete", uid=uid(1))
        await asyncio.sleep(30)
        assert (await shown(there.made)).holder == uid(1)
        there.hosts["n1"].stuck = False
        await there.hosts["n1"].look(await there.record(1))
        await there.until(lambda: _gone(there, 1))
        view = await shown(there.made)
        assert (view.state, view.node, view.holder) == ("Bound", "n1", "")
        await there.vm(2, "n1", **using("data"))
        assert (await shown(there.made)).holder == uid(2)


@site()
async def test_a_vm_with_a_volume_leaves_its_node_for_no_command(there: Site) -> None:
    async with there.host("n1").on():
        await there.until(lambda: _known(there, "n1"))
        await make(there.made)
        await there.vm(1, "n1", **using("data"), eviction_strategy="None")
        async with there.host("n2").on():
            await there.until(lambda: _known(there, "n2"))
            error = await refused(there.made.vm("move", uid=uid(1), discard_local_disks=True))
            assert (error.reason, "data" in str(error)) == ("volumes_stay", True)
            drained = await there.node("drain", "n1", discard_local_disks=True)
            await asyncio.sleep(30)
            drained = await there.node("get", "n1")
            assert "volumes are on this node (data)" in drained.vms[0].eviction_blocked_reason
            assert (await there.record(1)).node == "n1"


@site()
async def test_a_vm_with_a_volume_waits_for_its_fenced_node(there: Site) -> None:
    async with there.host("n2").on():
        await there.until(lambda: _known(there, "n2"))
        async with there.host("n1").on():
            await there.until(lambda: _known(there, "n1"))
            await make(there.made, node="n1")
            await there.vm(1, "n1", **using("data"))
        await asyncio.sleep(60)
        await there.node("fence", "n1", confirm="off", discard_local_disks=True)
        await asyncio.sleep(60)
        assert (await there.record(1)).node == "n1"
        assert (await shown(there.made)).holder == uid(1)
        assert "its volumes are on this node" in (await there.made.vm("get", uid=uid(1))).message
        await there.made.vm("delete", uid=uid(1))
        await there.until(lambda: _gone(there, 1))
        assert (await shown(there.made)).state == "Bound"


def _known(there: Site, name: str) -> bool:
    return name in next(iter(there.made.controllers.values()))._fleet.nodes


async def _gone(there: Site, number: int) -> bool:
    return await there.made.stored(uid(number)) is None


# --- races and crashes -----------------------------------------------------------------------
async def prepared() -> MemoryServer:
    server = MemoryServer()
    await MemoryBus(server).put(DATA, encode(volume(9)), expect=0)
    return server


def test_two_controllers_commit_two_vms_with_one_volume_and_one_wins() -> None:
    async def scenario(gates: Gates) -> None:
        server = await prepared()
        rivals = {
            f"c{n}": Commits(ScheduledBus(server, f"c{n}", gates)).create(
                holder(n, volume(9)), None
            )
            for n in (1, 2)
        }
        results = await gates.run(rivals)
        lost = [one for one in results.values() if isinstance(one, VirtbusError)]
        assert [one.reason for one in lost] == ["volume_in_use"]
        held = (await at(MemoryBus(server))).holder
        for number in (1, 2):
            there = await MemoryBus(server).get(subjects.vm_anywhere(uid(number)))
            stands = there is not None and there.kind is EntryKind.PUT
            assert stands == (held == uid(number))

    asyncio.run(sample(scenario, runs=100))


def test_a_delete_of_the_volume_and_a_create_of_its_vm_exclude_each_other() -> None:
    async def body() -> None:
        for _ in range(20):
            async with world(controllers=2) as made:
                await make(made)
                async with asyncio.TaskGroup() as group:
                    ending = group.create_task(tried(made.ask("delete", "volume", name="data")))
                    using_it = group.create_task(tried(vm(made, 1, "data")))
                assert {ending.result(), using_it.result()} in (
                    {"done", "volume_in_use"},
                    {"done", "deleting"},
                    {"done", "volume_not_found"},
                )

    run(body)


async def test_a_create_may_crash_at_every_call_and_the_volume_has_its_vm_or_nobody() -> None:
    crashes = 0
    async for server in broken_everywhere(
        prepared, lambda bus: Commits(bus).create(holder(1, volume(9)), None)
    ):
        crashes += 1
        bus = MemoryBus(server)
        entry = await bus.get(subjects.vm_anywhere(uid(1)))
        stands = entry is not None and entry.kind is EntryKind.PUT
        assert (await at(bus)).holder == (uid(1) if stands else "")
        again = await Commits(bus).create(holder(1, volume(9)), None)
        assert again.created == (not stands)
        assert (await at(bus)).holder == uid(1)
    assert crashes >= 3


async def test_a_delete_may_crash_at_every_call_and_frees_the_volume_with_the_record() -> None:
    async def there() -> MemoryServer:
        server = await prepared()
        await Commits(MemoryBus(server)).create(holder(1, volume(9)), None)
        return server

    async def finish(bus: MemoryBus) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Commits(bus).finish(held)

    async for server in broken_everywhere(there, finish):
        bus = MemoryBus(server)
        stands = await Commits(bus).latest(uid(1)) is not None
        assert (await at(bus)).holder == (uid(1) if stands else "")


async def test_a_volume_that_changed_after_its_vm_was_admitted_is_not_held() -> None:
    server = await prepared()
    bus = MemoryBus(server)
    grown = volume(9)
    grown = grown.model_copy(update={"spec": grown.spec.model_copy(update={"size": 2 * GIB})})
    await bus.put(DATA, encode(grown))
    with pytest.raises(VirtbusError) as caught:
        await Commits(bus).create(holder(1, volume(9)), None)
    assert caught.value.reason == "contended"
    assert await Commits(bus).latest(uid(1)) is None


# --- a lost bus ------------------------------------------------------------------------------
async def test_a_rebuild_restores_the_volumes_that_its_vms_hold() -> None:
    bus = MemoryBus(MemoryServer())
    commits, vm = Commits(bus), holder(1, volume(9))
    await VolumeWrites(bus).restore(vm)
    await commits.write_back(vm, await commits.known(vm.uid))
    there = await at(bus)
    assert (there.uid, there.node, there.bound, there.holder) == (uid(9), "n1", True, vm.uid)
    assert ref_of(there) == vm.volume_refs["data"]


async def test_a_rebuild_takes_no_volume_from_its_holder_and_restores_no_deleted_one() -> None:
    bus = MemoryBus(await prepared())
    commits = Commits(bus)
    await commits.create(holder(1, volume(9)), None)
    await VolumeWrites(bus).restore(holder(2, volume(9)))
    with pytest.raises(VirtbusError, match="holds the volume"):
        await commits.write_back(holder(2, volume(9)), await commits.known(uid(2)))
    assert (await at(bus)).holder == uid(1)
    gone = VolumeWrites(MemoryBus(MemoryServer()))
    await gone.end((await gone.create(volume(9)))[0])
    with pytest.raises(VirtbusError, match="was deleted"):
        await gone.restore(holder(1, volume(9)))


async def test_a_lost_volume_is_restored_over_the_marker_of_another() -> None:
    bus = MemoryBus(MemoryServer())
    await VolumeWrites(bus).end((await VolumeWrites(bus).create(volume(8)))[0])
    await VolumeWrites(bus).restore(holder(1, volume(9)))
    assert ((await at(bus)).uid, (await at(bus)).holder) == (uid(9), uid(1))


async def test_a_volume_that_is_older_on_the_bus_gets_the_place_that_its_vm_has() -> None:
    bus = MemoryBus(await prepared())
    commits, vm = Commits(bus), holder(1, volume(9))
    await commits.create(vm, None)
    ref = vm.volume_refs["data"].model_copy(update={"pool": "fast", "copied": True})
    update = {"node": "n2", "epoch": 2, "generation": 9, "volume_refs": {"data": ref}}
    newer = vm.model_copy(update=update)
    await VolumeWrites(bus).restore(newer)
    await commits.write_back(newer, await commits.known(vm.uid))
    there = await at(bus)
    assert (there.node, there.spec.pool, there.holder, there.move) == ("n2", "fast", vm.uid, None)
    assert ref_of(there) == ref
    other = holder(2, volume(9), "n3")
    await VolumeWrites(bus).restore(other)
    assert (await at(bus)).node == "n2", "not by the record of a VM that does not hold it"


async def test_a_volume_that_is_older_on_the_bus_gets_the_size_that_its_vm_has() -> None:
    bus, spec = MemoryBus(await prepared()), volume(9).spec
    grown = volume(9, spec=spec.model_copy(update={"size": 2 * GIB}))
    vm, commits = holder(1, grown), Commits(bus)
    await VolumeWrites(bus).restore(vm)
    await commits.write_back(vm, await commits.known(vm.uid))
    assert ((await at(bus)).spec.size, (await at(bus)).holder) == (2 * GIB, vm.uid)


# --- removal of data -------------------------------------------------------------------------
@asynccontextmanager
async def imaged(made: World, node_id: str, calls: list[str]) -> AsyncIterator[None]:
    """A node's imaged that removes volumes; `calls` are their folders."""

    async def release(request: Request) -> VolumeReleased:
        calls.append(validate(VolumeRelease, request.data).ref.folder)
        return VolumeReleased(found=True)

    subject = subjects.rpc(node_id, "imaged", "volume-release")
    info = ServiceInfo("virtbus-imaged", "1.0.0", "a test", {})
    async with MemoryBus(made.server, node_id).serve(info, [Endpoint("release", subject, release)]):
        yield


@played()
async def test_the_data_of_a_deleted_volume_is_removed_by_its_node(made: World) -> None:
    await made.host.put(DATA, encode(volume(1, node="n1", bound=True)))
    await settle()
    await made.ask("delete", "volume", name="data")
    await asyncio.sleep(4)
    assert (await shown(made)).state == "Deleting"
    await asyncio.sleep(60)
    assert "n1 does not answer" in (await shown(made)).message
    calls: list[str] = []
    async with imaged(made, "n1", calls):
        await asyncio.sleep(20)
    assert set(calls) == {f"default.data.{uid(1)}"}
    assert (await refused(shown(made))).reason == "volume_not_found"
    kinds = [m.subject.split(".", 4)[4] for m in await made.client.history(subjects.events(uid(1)))]
    assert kinds == ["volume.deleting", "volume.deleted"]


@played(nodes=2)
async def test_a_node_is_forgotten_with_the_volumes_that_the_request_names(made: World) -> None:
    await made.host.put(DATA, encode(volume(1, node="n1", bound=True)))
    other = subjects.volume_record("default", "empty")
    await made.host.put(other, encode(volume(2, "empty", node="n1")))
    await asyncio.sleep(60)
    error = await refused(made.ask("forget", "node", node="n1"))
    assert (error.reason, error.body.details[0].path) == ("node_has_volumes", "volume/default/data")
    assert (await shown(made)).state == "Bound"
    answer = await made.ask("forget", "node", node="n1", lose_volumes=["default/data"])
    assert answer["lost_volumes"] == 1
    assert (await shown(made)).state == "Lost"
    assert (await shown(made, "empty")).node == ""
    assert (await refused(vm(made, 1, "data"))).reason == "volume_lost"
    await made.ask("delete", "volume", name="data")
    assert (await refused(shown(made))).reason == "volume_not_found"


@played(nodes=2)
async def test_a_forgotten_node_loses_no_volume_on_a_server(made: World) -> None:
    await made.host.put(DATA, encode(volume(1, node="n1", bound=True, pool_kind=PoolKind.RBD)))
    await asyncio.sleep(60)
    assert not (await made.ask("forget", "node", node="n1")).get("lost_volumes")
    view = await shown(made)
    assert (view.state, view.node) == ("Available", "")


@played()
async def test_an_unreadable_vm_that_is_removed_keeps_its_volume(made: World) -> None:
    await make(made)
    one = await vm(made, 1, "data")
    key = subjects.vm_record(one.node, one.uid)
    await made.host.put(key, b"\xc1 no msgpack")
    await settle()
    await made.ask("delete", uid=one.uid)
    entry = await made.client.get(key)
    assert isinstance(entry, Entry)
    assert entry.kind is EntryKind.PURGE
    assert (await at(made.host)).holder == one.uid
