"""Attach and detach: the record of the VM and the holder of the volume change together."""

import asyncio
from typing import Any

from services.controller.tests.fleets import status, uid
from services.controller.tests.schedules import Gates, ScheduledBus, broken_everywhere, sample
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import (
    DATA,
    at,
    holder,
    make,
    prepared,
    shown,
    vm,
)
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.mutations import powered
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.volume_attachment import attached, detached
from virtbus.controller.edge.commit import Commits
from virtbus.schemas.disk import Disk
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import encode, validate

DISK = Disk(name="data")


async def off(made: World, number: int, *names: str) -> VmRecord:
    """A VM that its node reports as off."""
    await vm(made, number, *names)
    await made.vm("stop", uid=uid(number))
    found = await made.stored(uid(number))
    assert found is not None
    await made.say(status(found, VmState.STOPPED))
    await settle()
    return found


async def attach(made: World, name: str = "data", to: str = "vm1", **more: Any) -> VolumeView:
    return validate(VolumeView, await made.ask("attach", "volume", name=name, vm=to, **more))


async def detach(made: World, name: str = "data", **more: Any) -> VolumeView:
    return validate(VolumeView, await made.ask("detach", "volume", name=name, **more))


async def stored(made: World, number: int = 1) -> VmRecord:
    found = await made.stored(uid(number))
    assert found is not None
    return found


@played()
async def test_a_vm_that_is_off_gets_a_volume_and_gives_it_back(made: World) -> None:
    before = await off(made, 1)
    await make(made)
    view = await attach(made, bus="scsi")
    assert (view.state, view.node, view.holder_name) == ("InUse", "n1", "vm1")
    record = await stored(made)
    disk = record.spec.domain.devices.disks[-1]
    assert (disk.name, disk.bus, record.generation) == ("data", "scsi", before.generation + 1)
    assert record.volume_refs["data"].uid == view.uid
    assert (await attach(made)).generation == view.generation
    assert (await stored(made)).generation == record.generation
    await made.say(status(record, VmState.STOPPED))
    await settle()
    view = await detach(made, vm="vm1")
    assert (view.state, view.node, view.holder) == ("Bound", "n1", "")
    after = await stored(made)
    assert (after.spec, after.volume_refs) == (before.spec, {})
    assert (await detach(made)).state == "Bound"


@played(nodes=2)
async def test_an_attach_is_refused_with_the_reason(made: World) -> None:
    record = await off(made, 1)
    await make(made)
    missing = await refused(attach(made, "nothing"))
    assert missing.reason == "volume_not_found"
    assert (await refused(attach(made, to="nobody"))).reason == "vm_not_found"
    assert (await refused(attach(made, disk="root"))).reason == "disk_name_taken"
    await make(made, "far", node="n2" if record.node == "n1" else "n1")
    assert (await refused(attach(made, "far"))).reason == "volume_elsewhere"
    await attach(made)
    await off(made, 2)
    taken = await refused(attach(made, to="vm2"))
    assert (taken.reason, uid(1) in str(taken)) == ("volume_in_use", True)
    assert (await refused(detach(made, vm="vm2"))).reason == "not_its_holder"
    assert (await shown(made)).holder == uid(1)


def test_two_controllers_attach_one_volume_at_once_and_one_vm_gets_it() -> None:
    winners = set()

    async def scenario(gates: Gates) -> None:
        server = await prepared()
        free, tries = volume(9), {}
        for number in (1, 2):
            with_it = holder(number, free).model_copy(update={"powered": False})
            told = status(with_it, VmState.STOPPED)
            bare = detached(with_it, told, free)
            stands = (await Commits(MemoryBus(server)).create(bare, None)).held
            commits = Commits(ScheduledBus(server, f"c{number}", gates))
            tries[f"c{number}"] = commits.replace(stands, attached(bare, told, free, DISK))
        results = await gates.run(tries)
        lost = [one for one in results.values() if isinstance(one, VirtbusError)]
        assert [one.reason for one in lost] == ["volume_in_use"]
        winner = (await at(MemoryBus(server))).holder
        winners.add(winner)
        for number in (1, 2):
            there = await Commits(MemoryBus(server)).latest(uid(number))
            assert isinstance(there, StoredVm)
            assert bool(there.record.volume_refs) == (winner == uid(number))

    asyncio.run(sample(scenario, runs=100))
    assert winners == {uid(1), uid(2)}


def test_a_start_and_a_detach_exclude_each_other() -> None:
    async def scenario(gates: Gates) -> None:
        server = await prepared()
        one = holder(1, volume(9)).model_copy(update={"powered": False})
        stands = (await Commits(MemoryBus(server)).create(one, None)).held
        told = status(one, VmState.STOPPED)
        changes = {"start": powered(one, on=True), "detach": detached(one, told, volume(9))}
        results = await gates.run(
            {
                name: Commits(ScheduledBus(server, name, gates)).replace(stands, record)
                for name, record in changes.items()
            }
        )
        (lost,) = [name for name, one in results.items() if isinstance(one, ConflictError)]
        assert (await at(MemoryBus(server))).holder == (uid(1) if lost == "detach" else "")

    asyncio.run(sample(scenario, runs=100))


async def test_a_detach_may_crash_at_every_call_and_vm_and_volume_agree() -> None:
    one = holder(1, volume(9)).model_copy(update={"powered": False})
    told = status(one, VmState.STOPPED)

    async def there() -> MemoryServer:
        server = await prepared()
        await Commits(MemoryBus(server)).create(one, None)
        return server

    async def take(bus: MemoryBus) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Commits(bus).replace(held, detached(held.record, told, volume(9)))

    async for server in broken_everywhere(there, take):
        held = await Commits(MemoryBus(server)).latest(uid(1))
        assert isinstance(held, StoredVm)
        has = bool(held.record.volume_refs)
        assert (await at(MemoryBus(server))).holder == (uid(1) if has else "")


def test_a_detach_restores_the_spec_that_an_attach_changed() -> None:
    one = holder(1, volume(9)).model_copy(update={"powered": False})
    told = status(one, VmState.STOPPED)
    bare = detached(one, told, volume(9))
    assert {disk.name for disk in bare.spec.domain.devices.disks} == {"root", "cloudinit"}
    again = attached(bare, told, volume(9), DISK)
    assert (again.spec.volumes, again.volume_refs) == (one.spec.volumes, one.volume_refs)


@played()
async def test_a_person_ends_the_hold_of_a_vm_without_a_record(made: World) -> None:
    held = volume(9, node="n1", bound=True, holder=uid(1))
    await made.host.put(DATA, encode(held))
    assert (await refused(detach(made))).reason == "vm_not_found"
    assert (await refused(detach(made, gone=uid(2)))).reason == "not_its_holder"
    view = await detach(made, gone=uid(1))
    assert (view.state, view.holder) == ("Bound", "")
    await vm(made, 2, "data")
    assert (await refused(detach(made, gone=uid(2)))).reason == "not_gone"
    assert (await shown(made)).holder == uid(2)


@played()
async def test_an_unreadable_volume_delays_no_end_of_its_vm_and_is_mended_by_a_person(
    made: World,
) -> None:
    await make(made)
    await vm(made, 1, "data")
    await made.host.put(DATA, b"\xc1 no msgpack")
    await settle()
    await made.vm("delete", uid=uid(1))
    assert (await refused(detach(made, gone=uid(1)))).reason == "not_gone"
    await made.say(status(await stored(made), VmState.STOPPED, released=True))
    await asyncio.sleep(10)
    assert await made.stored(uid(1)) is None
    assert (await refused(made.ask("delete", "volume", name="data"))).reason == "volume_in_use"
    assert (await refused(detach(made))).reason == "unreadable"
    view = await detach(made, gone=uid(1))
    assert (view.state, view.holder) == ("Bound", "")
    await vm(made, 2, "data")
    assert (await shown(made)).holder == uid(2)
