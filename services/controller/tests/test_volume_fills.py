"""Volumes that are copies: a controller begins the work, and takes its end over from the node."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, record, status, uid
from services.controller.tests.test_snapshot_api import releasing
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import Fault
from virtbus.controller.core.volume_changes import adopted, state_of
from virtbus.controller.core.volume_holds import ref_of, restored
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.states import VmState
from virtbus.schemas.volume import FillState, VolumeFill, VolumeRecord
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import encode, read, validate

COPY = subjects.volume_record("default", "copy")
URL = "https://example.org/disk.qcow2"
OF_IMAGE = {"size": 0, "source": {"image": URL, "full": True}}
OF_VOLUME = {"size": 0, "source": {"volume": "data"}}


async def make(made: World, spec: dict[str, Any] = OF_IMAGE, **more: Any) -> VolumeView:
    asked = {"name": "copy", "uid": uid(5), "spec": spec} | more
    return validate(VolumeView, (await made.ask("create", "volume", **asked))["volume"])


async def snapshot(made: World, **more: Any) -> SnapshotRecord:
    """Write a complete snapshot of a VM, on n1."""
    plain: dict[str, Any] = {"uid": uid(8), "namespace": "default", "name": "s1", "resource": "vm"}
    plain |= {"source": "web", "source_uid": uid(7), "node": "n1", "ready": True, "created_ns": 1}
    one = SnapshotRecord.model_validate(plain | more)
    await made.host.put(subjects.snapshot_record("default", "s1"), encode(one))
    await settle()
    return one


async def get(made: World) -> VolumeView:
    return validate(VolumeView, await made.ask("get", "volume", name="copy"))


async def stored(made: World) -> VolumeRecord:
    entry = await made.host.get(COPY)
    assert entry is not None
    return read(VolumeRecord, entry.value)


async def operations(made: World) -> list[OperationRecord]:
    """Return the operations on the bus, the oldest first."""
    page = await made.ask("list", "operation")
    found = [
        await made.host.get(subjects.operation_record(i["node"], i["id"])) for i in page["items"]
    ]
    return [read(OperationRecord, entry.value) for entry in found if entry is not None]


async def say(made: World, phase: OperationPhase, **more: Any) -> None:
    """Write the status of the last operation, as its node does, and let the leader see it."""
    one = (await operations(made))[-1]
    known = OperationStatus(id=one.id, node=one.node, phase=phase, **more)
    await made.host.put(subjects.operation_status(one.node, one.id), encode(known))
    await asyncio.sleep(5)


async def with_data(made: World, **more: Any) -> VolumeRecord:
    one = volume(1, **{"bound": True, "node": "n1", **more})
    await made.host.put(subjects.volume_record("default", "data"), encode(one))
    await settle()
    return one


@played()
async def test_a_copy_of_an_image_is_filled_and_gets_its_size(made: World) -> None:
    view = await make(made)
    assert (view.state, view.node, view.spec.size) == ("Filling", "n1", 0)
    (one,) = await operations(made)
    assert (one.kind, one.id, one.node) == ("fill", view.fill_operation, "n1")
    assert one.source is not None
    assert one.ref is not None
    assert (one.source.image, one.ref.copied, one.ref.image) == (URL, True, "")
    await say(made, OperationPhase.RUNNING, step="copy", done_bytes=1, total_bytes=4)
    assert "copy, 25 %" in (await get(made)).message
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=2 * GIB, ended_ns=1)
    view = await get(made)
    assert (view.state, view.spec.size, view.fill_operation) == ("Bound", 2 * GIB, "")
    assert await make(made) == view
    found = await made.client.history(subjects.events(uid(5)))
    kinds = [message.subject.split(".", 4)[4] for message in found]
    assert kinds == ["volume.created", "operation.accepted", "volume.updated"]


@played()
async def test_a_copy_of_a_volume_is_on_its_node_with_its_size(made: World) -> None:
    await made.hear(node("n2", disk_free_bytes=GIB))
    source = await with_data(made)
    view = await make(made, OF_VOLUME)
    assert (view.state, view.node, view.spec.size) == ("Filling", "n1", source.spec.size)
    (one,) = await operations(made)
    assert one.source is not None
    assert one.source.volume is not None
    assert one.source.volume.uid == source.uid
    larger = {**OF_VOLUME, "size": 2 * GIB}
    assert (await make(made, larger, name="b", uid=uid(6))).spec.size == 2 * GIB


@pytest.mark.parametrize(
    ("spec", "source", "more", "reason"),
    [
        (OF_VOLUME, None, {}, "volume_not_found"),
        (OF_VOLUME, {"bound": False}, {}, "volume_empty"),
        (OF_VOLUME, {"lost": True}, {}, "volume_lost"),
        (OF_VOLUME, {"deleting": True}, {}, "deleting"),
        (OF_VOLUME, {"holder": uid(9)}, {}, "volume_in_use"),
        (OF_VOLUME, {"fill": VolumeFill(operation=uid(8))}, {}, "volume_not_filled"),
        (OF_VOLUME, {}, {"node": "n2"}, "volume_elsewhere"),
        ({**OF_VOLUME, "size": GIB // 2}, {}, {}, "invalid"),
        (OF_IMAGE, None, {"node": "n9"}, "node_not_found"),
        ({**OF_IMAGE, "size": 4 * GIB}, None, {}, "no_node"),
    ],
)
def test_refusals_write_nothing(
    spec: dict[str, Any], source: dict[str, Any] | None, more: dict[str, Any], reason: str
) -> None:
    @played(nodes=2)
    async def scenario(made: World) -> None:
        for name in ("n1", "n2"):
            await made.hear(node(name, disk_free_bytes=3 * GIB, disk_reserve_bytes=1))
        if source is not None:
            await with_data(made, **source)
        await settle()
        assert (await refused(make(made, spec, **more))).reason == reason
        assert await made.host.get(COPY) is None
        assert await operations(made) == []

    scenario()


@played(nodes=3)
async def test_a_copy_goes_to_a_node_with_the_image_or_with_space(made: World) -> None:
    free = {"n1": 9, "n2": 5, "n3": 7}
    for name, spare in free.items():
        await made.hear(node(name, disk_free_bytes=spare * GIB, disk_reserve_bytes=GIB))
    await made.ask("cordon", "node", node="n1")
    await settle()
    assert (await make(made)).node == "n3"


@played()
async def test_a_volume_that_is_held_by_a_vm_that_is_off_is_copied(made: World) -> None:
    vm = record(1, powered=False)
    await made.host.put(subjects.name_claim("default", vm.name), encode({"uid": vm.uid}))
    await made.host.put(subjects.vm_record("n1", vm.uid), encode(vm))
    await made.say(status(vm, VmState.RUNNING))
    await with_data(made, holder=vm.uid)
    assert "vm stop web" in str(await refused(make(made, OF_VOLUME)))
    await made.say(status(vm, VmState.STOPPED))
    await settle()
    assert (await make(made, OF_VOLUME)).state == "Filling"


@played()
async def test_a_disk_of_a_vm_that_is_off_is_copied_on_its_node(made: World) -> None:
    vm = record(1, powered=False)
    await made.host.put(subjects.name_claim("default", vm.name), encode({"uid": vm.uid}))
    await made.host.put(subjects.vm_record("n1", vm.uid), encode(vm))
    await made.say(status(vm, VmState.RUNNING))
    await settle()
    spec = {"size": 0, "source": {"vm": "web"}}
    assert (await refused(make(made, spec))).reason == "vm_runs"
    await made.say(status(vm, VmState.STOPPED))
    await settle()
    for source, reason in (({"vm": "x"}, "vm_not_found"), ({"vm": "web", "disk": "x"}, "no_disk")):
        assert (await refused(make(made, {"size": 0, "source": source}))).reason == reason
    view = await make(made, spec)
    (one,) = await operations(made)
    assert one.source is not None
    assert (view.node, one.source.vm, one.source.disk) == ("n1", vm.uid, "root")
    assert (one.source.epoch, one.source.volume) == (vm.epoch, None)


@played()
async def test_a_failed_copy_is_repeated_or_deleted(made: World) -> None:
    await make(made)
    error = VirtbusError(Code.UNAVAILABLE, "disk_full", "the node is full").body
    await say(made, OperationPhase.FAILED, error=error, ended_ns=1)
    view = await get(made)
    assert view.state == "FillFailed"
    assert "the node is full; `virtbus volume fill copy" in view.message
    again = validate(VolumeView, await made.ask("fill", "volume", name="copy"))
    assert (again.state, len(await operations(made))) == ("Filling", 2)
    assert again.fill_operation != view.fill_operation
    await say(made, OperationPhase.CANCELLED, ended_ns=1)
    assert (await get(made)).message.startswith("it was cancelled; ")
    await made.ask("fill", "volume", name="copy")
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
    assert (await get(made)).state == "Bound"
    assert (await refused(made.ask("fill", "volume", name="copy"))).reason == "volume_filled"
    await with_data(made)
    assert (await refused(made.ask("fill", "volume", name="data"))).reason == "not_copied"


@played(controllers=2)
async def test_a_controller_that_dies_after_the_volume_leaves_the_rest_to_the_leader(
    made: World,
) -> None:
    view = await make(made)
    kept = await stored(made)
    for one in await operations(made):
        await made.host.purge(subjects.operation_record(one.node, one.id))
    fresh = VolumeFill(
        operation=uid(44), source=kept.fill.source if kept.fill else VolumeFill().source
    )
    await made.host.put(COPY, encode(kept.model_copy(update={"fill": fresh})))
    await asyncio.sleep(5)
    (one,) = await operations(made)
    assert (one.id, one.uid) == (uid(44), view.uid)
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
    assert (await get(made)).state == "Bound"


@played()
async def test_an_operation_that_was_removed_is_a_failure(made: World) -> None:
    view = await make(made)
    await made.host.purge(
        subjects.operation_record("n1", view.fill_operation), marker_ttl_s=60, why=b"deleted"
    )
    await asyncio.sleep(10)
    assert (await get(made)).state == "FillFailed"


@pytest.mark.parametrize("fault", list(Fault))
def test_a_write_that_fails_is_repeated(fault: Fault) -> None:
    @played()
    async def scenario(made: World) -> None:
        faults = made.buses["c1"].faults
        faults.append(fault)
        await refused(make(made))
        await make(made)
        assert len(await operations(made)) == 1
        faults.append(fault)
        await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
        await asyncio.sleep(5)
        assert ((await get(made)).state, len(await operations(made))) == ("Bound", 1)

    scenario()


@played()
async def test_a_vm_may_be_created_while_its_volume_is_filled(made: World) -> None:
    await make(made)
    spec = {"volumes": [{"name": "root", "volume": {"name": "copy"}}]}
    vm = await made.vm("create", name="web", uid=uid(1), spec=spec)
    assert vm.node == "n1"
    assert (await get(made)).state == "Filling"
    kept = await made.stored(uid(1))
    assert kept is not None
    assert (kept.volume_refs["root"].copied, kept.volume_refs["root"].size_bytes) == (True, 0)
    assert (await refused(made.ask("delete", "volume", name="copy"))).reason == "volume_in_use"
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
    assert (await get(made)).state == "InUse"
    assert (await get(made)).spec.size == GIB


@played()
async def test_a_size_below_that_of_the_source_becomes_true(made: World) -> None:
    await make(made)
    await made.ask("update", "volume", name="copy", size=GIB // 2)
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
    assert (await get(made)).spec.size == GIB


@played()
async def test_a_waiting_vm_is_placed_after_its_volume_got_its_size(made: World) -> None:
    await make(made)
    await made.ask("cordon", "node", node="n1")
    spec = {"volumes": [{"name": "root", "volume": {"name": "copy"}}]}
    await made.vm("create", name="web", uid=uid(1), spec=spec)
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB, ended_ns=1)
    await made.ask("uncordon", "node", node="n1")
    await asyncio.sleep(10)
    kept = await made.stored(uid(1))
    assert kept is not None
    assert kept.node == "n1"


@played()
async def test_an_unfilled_volume_is_neither_exported_nor_protected_from_its_delete(
    made: World,
) -> None:
    await make(made)
    error = await refused(made.ask("export", "operation", volume="copy"))
    assert error.reason == "volume_not_filled"
    view = validate(VolumeView, await made.ask("delete", "volume", name="copy"))
    assert view.state == "Deleting"
    await asyncio.sleep(10)
    (one,) = await operations(made)
    assert one.kind == "fill"
    page = await made.ask("get", "operation", id=one.id)
    assert page["phase"] == "Cancelled"


@played()
async def test_the_quota_of_operations_limits_copies(made: World) -> None:
    for number in range(100):
        await make(made, name=f"copy-{number}", uid=uid(100 + number))
    full = await refused(make(made))
    assert (full.code, full.reason) == (429, "operation_quota")
    assert await made.host.get(COPY) is None
    assert (await stored_state(made, "copy-7")) is FillState.FILLING


async def stored_state(made: World, name: str) -> FillState | None:
    entry = await made.host.get(subjects.volume_record("default", name))
    assert entry is not None
    fill = read(VolumeRecord, entry.value).fill
    return fill.state if fill is not None else None


def test_a_lost_record_of_a_copy_comes_back_with_its_content() -> None:
    """Its VM's record, or its node, says that it is a copy; nobody else makes its disk."""
    known = volume(1, fill=VolumeFill(operation=uid(8), state=FillState.FILLED), bound=True)
    ref = ref_of(known).model_copy(update={"size_bytes": 0})
    for back in (adopted(ref, "n1", 5), restored(ref, record(1), 5)):
        assert back.fill is not None
        assert (back.fill.state, back.spec.source.image, back.bound) == ("Filled", None, True)
        assert ref_of(back).copied
        assert state_of(back) in {"Bound", "InUse"}


@played()
async def test_a_restored_bus_repeats_the_operation_of_a_copy(made: World) -> None:
    view = await make(made)
    kept = await stored(made)
    (one,) = await operations(made)
    key = subjects.operation_record(one.node, one.id)
    await made.host.purge(key)
    made.server.shelf(key).entries.pop(key)  # a restored bus has no marker
    await made.host.put(COPY, encode(kept))
    await asyncio.sleep(5)
    (again,) = await operations(made)
    assert (again.id, again.source) == (view.fill_operation, one.source)


OF_SNAPSHOT = {"size": 0, "source": {"snapshot": "s1", "disk": "root"}}


@played(nodes=2)
async def test_a_copy_of_a_snapshot_is_made_on_its_node(made: World) -> None:
    taken = await snapshot(made)
    view = await make(made, OF_SNAPSHOT)
    assert (view.state, view.node) == ("Filling", "n1")
    (one,) = await operations(made)
    assert one.source is not None
    assert one.source.snapshot is not None
    assert (one.source.snapshot.uid, one.source.disk) == (taken.uid, "root")
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB)
    assert ((await get(made)).state, (await get(made)).spec.size) == ("Bound", GIB)


@played(nodes=2)
async def test_a_snapshot_stays_while_a_volume_copies_it(made: World) -> None:
    await snapshot(made)
    await make(made, OF_SNAPSHOT)
    error = await refused(made.ask("delete", "snapshot", name="s1"))
    assert (error.reason, "the volume copy" in str(error)) == ("snapshot_in_use", True)
    await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB)
    assert (await made.ask("delete", "snapshot", name="s1"))["state"] == "Deleting"


@played(nodes=2)
async def test_a_delete_that_was_accepted_together_with_a_copy_waits_for_it(made: World) -> None:
    await snapshot(made)
    await make(made, OF_SNAPSHOT)
    await snapshot(made, deleting=True)
    async with releasing(made) as released:
        await asyncio.sleep(10)
        assert released == []
        await say(made, OperationPhase.SUCCEEDED, virtual_size_bytes=GIB)
        await asyncio.sleep(10)
        assert len(released) == 1


@played(nodes=2)
async def test_a_snapshot_that_cannot_be_copied_is_refused(made: World) -> None:
    assert (await refused(make(made, OF_SNAPSHOT))).reason == "snapshot_not_found"
    await snapshot(made, ready=False)
    assert (await refused(make(made, OF_SNAPSHOT))).reason == "snapshot_not_ready"
    await snapshot(made)
    assert (await refused(make(made, OF_SNAPSHOT, node="n2"))).reason == "volume_elsewhere"
    await snapshot(made, lost=True)
    assert (await refused(make(made, OF_SNAPSHOT))).reason == "snapshot_lost"
    two = {"size": 0, "source": {"snapshot": "s1", "volume": "data"}}
    assert (await refused(make(made, two))).code == 400
    assert await operations(made) == []
