"""Attach, detach and growth of volumes while the guest may run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_attachments import (
    DISK,
    attach,
    detach,
    off,
    stored,
)
from services.controller.tests.test_volume_holders import make, shown, vm
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.core.volume_attachment import released
from virtbus.schemas import subjects
from virtbus.schemas.disk_buses import ABILITIES, Verb
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestFilesystem, GuestInfo
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import DiskBus, ImageVolume, VmRecord
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import validate


async def running(made: World, number: int = 1, *names: str) -> VmRecord:
    for name in names:
        await make(made, name)
    found = await vm(made, number, *names)
    await told(made, number)
    return found


async def told(made: World, number: int = 1, **more: Any) -> None:
    """The VM's node reports its guest, with the present record."""
    await made.say(status(await stored(made, number), **more))
    await settle()


async def update(made: World, **more: Any) -> VolumeView:
    return validate(VolumeView, await made.ask("update", "volume", name="data", **more))


@played()
async def test_a_running_vm_gets_a_volume(made: World) -> None:
    before = await running(made)
    await make(made)
    view = await attach(made)
    assert (view.state, view.holder_name, view.node) == ("InUse", "vm1", "n1")
    record = await stored(made)
    assert record.spec.domain.devices.disks[-1] == DISK
    assert (record.generation, record.power_epoch) == (before.generation + 1, before.power_epoch)
    await told(made, disks_pending={"data": "Attaching: imaged has not made the disk yet"})
    assert (await shown(made)).message == "Attaching: imaged has not made the disk yet"


@played()
async def test_a_volume_stays_held_until_the_guest_has_released_it(made: World) -> None:
    await running(made, 1, "data")
    await running(made, 2)
    view = await detach(made)
    assert (view.state, view.holder_name) == ("Detaching", "vm1")
    record = await stored(made)
    assert "disk-data" not in {one.name for one in record.spec.domain.devices.disks}
    assert set(record.detaching) == {"disk-data"}
    assert (await detach(made)).generation == view.generation, "a repeat changes nothing"
    assert (await refused(attach(made, to="vm2"))).reason == "volume_in_use"
    assert (await refused(attach(made))).reason == "detaching"
    assert (await refused(made.ask("delete", "volume", name="data"))).reason == "volume_in_use"
    why = "Detaching: the guest has not released it"
    await told(made, disks_pending={"disk-data": why})
    assert (await shown(made)).message == why
    await told(made, detached=("disk-data",))
    assert ((await shown(made)).state, (await stored(made)).volume_refs) == ("Bound", {})
    await attach(made, to="vm2")


@asynccontextmanager
async def guest_agent(made: World, answer: GuestInfo | Exception) -> AsyncIterator[list[Any]]:
    """The agent of the VM's node answers for the guest."""
    asked: list[Any] = []

    async def tell(request: Request) -> GuestInfo:
        asked.append(request.data)
        if isinstance(answer, Exception):
            raise answer
        return answer

    subject = subjects.rpc((await stored(made)).node, "agent", "guest")
    endpoint = Endpoint("agent-guest", subject, tell)
    async with made.host.serve(ServiceInfo("virtbus-nodeagent", "0"), [endpoint]):
        yield asked


@played()
async def test_a_mounted_volume_is_detached_by_force_only(made: World) -> None:
    await running(made, 1, "data")
    mounted = GuestFilesystem(name="vdb", mountpoint="/srv", spec_disks=("disk-data",))
    other = GuestFilesystem(name="vda1", mountpoint="/", spec_disks=("root",))
    async with guest_agent(made, GuestInfo(filesystems=(other, mounted))) as asked:
        error = await refused(detach(made))
        assert (error.code, error.reason, "/srv" in str(error)) == (409, "volume_mounted", True)
        assert (await shown(made)).state == "InUse"
        assert (await detach(made, force=True)).state == "Detaching"
        assert (await detach(made)).state == "Detaching", "a repeat asks nobody"
    assert [one["about"] for one in asked] == [["filesystems"]]


@pytest.mark.parametrize(
    "answer",
    [
        GuestInfo(filesystems=(GuestFilesystem(name="vda1", spec_disks=("root",)),)),
        VirtbusError(Code.CONFLICT, "guest_agent_absent", "no guest agent runs"),
        VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", "it does not answer"),
    ],
    ids=["not mounted", "absent", "silent"],
)
def test_a_guest_that_cannot_tell_keeps_no_volume(answer: GuestInfo | Exception) -> None:
    async def scenario(made: World) -> None:
        await running(made, 1, "data")
        async with guest_agent(made, answer):
            assert (await detach(made)).state == "Detaching"

    played()(scenario)()


@played()
async def test_a_report_about_an_earlier_detach_frees_nothing(made: World) -> None:
    await running(made, 1, "data")
    await detach(made)
    record = await stored(made)
    about = partial(status, record)
    for said in (
        about(generation=record.generation - 1, detached=("disk-data",)),
        about(epoch=record.epoch - 1, detached=("disk-data",)),
        about(node="n9", detached=("disk-data",)),
        about(detached=("other",)),
    ):
        assert released(record, said) is record
    assert released(record, None) is record
    assert released(record, status(record, detached=("disk-data",))).volume_refs == {}


@played()
async def test_the_end_of_a_guest_frees_what_it_had_not_released(made: World) -> None:
    await running(made, 1, "data")
    await detach(made)
    await made.vm("stop", uid=uid(1))
    await told(made, state=VmState.STOPPED, detached=("disk-data",))
    assert (await shown(made)).holder == ""


@played()
async def test_a_detach_of_a_vm_that_is_off_ends_a_detach_that_waits(made: World) -> None:
    await running(made, 1, "data")
    await detach(made)
    await made.vm("stop", uid=uid(1))
    await told(made, state=VmState.STOPPED)
    assert (await detach(made)).state == "Bound"


@pytest.mark.parametrize("bus", DiskBus)
def test_the_table_of_buses_decides_about_a_running_vm(bus: DiskBus) -> None:
    plugs = not ABILITIES[bus][Verb.HOT_PLUG].refused and bus is not DiskBus.USB

    async def scenario(made: World) -> None:
        await running(made)
        await make(made)
        if not plugs:
            error = await refused(attach(made, bus=bus))
            assert (error.reason, "virtbus vm stop vm1" in str(error)) == ("not_off", True)
            await made.vm("stop", uid=uid(1))
            await told(made, state=VmState.STOPPED)
        await attach(made, bus=bus)
        await made.vm("start", uid=uid(1))
        await told(made)
        for verb, ask in ((Verb.GROW, partial(update, size="2GiB")), (Verb.UNPLUG, detach)):
            ability = ABILITIES[bus][verb]
            if not ability.refused:
                await ask(made)
                continue
            error = await refused(ask(made))
            assert (error.reason, ability.why in str(error)) == ("not_off", True)

    played()(scenario)()


@played(nodes=0)
async def test_a_vm_without_a_node_keeps_its_volumes(made: World) -> None:
    await make(made)
    await vm(made, 1, "data")
    assert (await refused(detach(made))).reason == "unplaced"


@played()
async def test_a_second_usb_disk_needs_no_new_controller(made: World) -> None:
    await off(made, 1)
    await make(made)
    await make(made, "more")
    await attach(made, bus="usb")
    await made.vm("start", uid=uid(1))
    await told(made)
    assert (await attach(made, "more", bus="usb")).state == "InUse"


@played()
async def test_a_disk_of_the_vms_own_grows_and_never_shrinks(made: World) -> None:
    disks = [{"name": "root"}, {"name": "more", "bus": "sata"}]
    volumes = [
        {"name": "root", "image": {"ref": "tiny"}},
        {"name": "more", "empty_disk": {"capacity": "1GiB"}},
    ]
    spec = {"domain": {"devices": {"disks": disks}}, "volumes": volumes}
    await made.ask("create", name="vm1", uid=uid(1), spec=spec)
    await told(made)

    async def size(at: int, field: str, key: str, size_bytes: int) -> VmRecord:
        view = await made.vm("get", uid=uid(1))
        plain = view.spec.model_dump(mode="json")
        plain["volumes"][at][field][key] = size_bytes
        await made.vm("update", uid=uid(1), revision=view.revision, spec=plain)
        return await stored(made)

    before = await stored(made)
    after = await size(0, "image", "size", 2 * GIB)
    assert after.spec.volumes[0].image == ImageVolume(ref="tiny", size=2 * GIB)
    assert after.generation == before.generation + 1
    await told(made)
    assert (await refused(size(0, "image", "size", GIB))).reason == "immutable"
    assert (await refused(size(1, "empty_disk", "capacity", 2 * GIB))).reason == "not_off"
    await made.vm("stop", uid=uid(1))
    await told(made, state=VmState.STOPPED)
    await size(1, "empty_disk", "capacity", 2 * GIB)


@played()
async def test_a_volume_grows_together_with_the_record_of_its_vm(made: World) -> None:
    before = await running(made, 1, "data")
    view = await update(made, size="2GiB", labels={"a": "b"})
    assert (view.spec.size, view.labels, view.state) == (2 * GIB, {"a": "b"}, "InUse")
    record = await stored(made)
    assert record.volume_refs["disk-data"].size_bytes == 2 * GIB
    assert record.generation == before.generation + 1
    assert (await refused(update(made, size="1GiB"))).code == 400
    await update(made, size="2GiB")
    assert (await stored(made)).generation == record.generation
