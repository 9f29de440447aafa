"""The API of snapshots as a client sees it, and what the leader does with them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.controller.tests.fleets import status, uid
from services.controller.tests.test_operation_api import off
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, EntryKind, Request, ServiceInfo
from virtbus.controller.edge.operation_api import OperationApi
from virtbus.schemas import subjects
from virtbus.schemas.audit import Audited
from virtbus.schemas.errors import Code
from virtbus.schemas.node_rpc import HeldResources, HeldSnapshot, Inspect
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.snapshot import SnapshotRecord, SnapshotRef
from virtbus.schemas.snapshot_api import SnapshotView
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotReleased
from virtbus.schemas.states import VmState
from virtbus.schemas.volume import VolumeSpec
from virtbus.schemas.wire import encode, read, validate

ID, KEPT = uid(90), uid(91)
KEY = subjects.snapshot_record("default", "s")


async def ask(made: World, verb: str, **more: Any) -> SnapshotView:
    asked = {"name": "s"} | more
    return validate(SnapshotView, await made.ask(verb, "snapshot", **asked))


async def create(made: World, **more: Any) -> SnapshotView:
    return await ask(made, "create", **({"vm": "web", "uid": ID} | more))


async def end(made: World, id_: str = ID, phase: OperationPhase = OperationPhase.SUCCEEDED) -> None:
    """End an operation as its node does."""
    one = OperationStatus(id=id_, node="n1", phase=phase, done_bytes=7, ended_ns=1)
    await made.host.put(subjects.operation_status("n1", id_), encode(one))
    await asyncio.sleep(10)


async def operation(made: World, id_: str = ID) -> OperationRecord:
    entry = await made.host.get(subjects.operation_record("n1", id_))
    assert entry is not None
    return read(OperationRecord, entry.value)


async def stored(made: World, name: str = "s") -> SnapshotRecord | None:
    entry = await made.host.get(subjects.snapshot_record("default", name))
    if entry is None or entry.kind is EntryKind.PURGE:
        return None
    return read(SnapshotRecord, entry.value)


@asynccontextmanager
async def releasing(made: World, *there: HeldSnapshot) -> AsyncIterator[list[str]]:
    """imaged of n1, which has the snapshots `there` and removes the data of snapshots."""
    released: list[str] = []

    async def inspect(_: Request) -> HeldResources:
        return HeldResources(snapshots=there)

    async def release(request: Request) -> SnapshotReleased:
        released.append(validate(SnapshotRelease, request.data).ref.uid)
        return SnapshotReleased(found=True)

    endpoints = [
        Endpoint("release", subjects.rpc("n1", "imaged", "snapshot-release"), release),
        Endpoint("inspect", subjects.rpc("n1", "imaged", "inspect"), inspect),
    ]
    async with MemoryBus(made.server, "n1").serve(ServiceInfo("imaged", "1"), endpoints):
        yield released


@played()
async def test_a_snapshot_of_a_vm_is_made_by_an_operation_of_its_node(made: World) -> None:
    one = await off(made)
    view = await create(made, protected=True)
    assert (view.uid, view.state, view.node, view.source_uid) == (ID, "Creating", "n1", one.uid)
    op = await operation(made)
    assert (op.kind, op.uid, op.epoch, op.restored) == ("snapshot", one.uid, one.epoch, None)
    assert op.snapshot == SnapshotRef(uid=ID, namespace="default", name="s")
    assert (await create(made, protected=True)).revision == view.revision
    await end(made)
    view = await ask(made, "get")
    assert (view.state, view.size_bytes, view.protected) == ("Ready", 7, True)
    assert (await create(made)).state == "Ready"
    page = await made.ask("list", "snapshot", vm="web")
    assert [item["name"] for item in page["items"]] == ["s"]
    assert (await made.ask("list", "snapshot", volume="web"))["items"] == []
    found = await made.client.history(subjects.events(ID))
    kinds = [message.subject.split(".", 4)[4] for message in found]
    assert kinds == ["snapshot.created", "snapshot.ready"]


@pytest.mark.parametrize("case", ["runs", "two", "none", "unknown", "taken", "quota"])
def test_refusals(case: str) -> None:
    wanted = {
        "runs": "vm_runs",
        "two": "invalid",
        "none": "invalid",
        "unknown": "vm_not_found",
        "taken": "name_taken",
        "quota": "operation_quota",
    }

    @played()
    async def scenario(made: World) -> None:
        one = await off(made)
        cases: dict[str, dict[str, Any]] = {
            "two": {"volume": "data"},
            "none": {"vm": None},
            "unknown": {"vm": "other"},
        }
        more = cases.get(case, {})
        if case == "runs":
            await made.say(status(one, VmState.STARTING))
            await settle()
        elif case == "taken":
            await create(made, uid=uid(5))
        elif case == "quota":
            for number in range(100):
                await create(made, uid=uid(1000 + number), name=f"s-{number}")
        assert (await refused(create(made, **more))).reason == wanted[case]

    scenario()


@played()
async def test_a_volume_is_copied_while_no_guest_uses_it(made: World) -> None:
    key = subjects.volume_record("default", "data")
    one = await off(made)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "volume_empty"),
        ({"bound": True, "holder": uid(3)}, "volume_in_use"),
        ({"bound": True, "deleting": True}, "deleting"),
        ({"bound": True, "lost": True}, "volume_lost"),
    ]
    for more, reason in cases:
        await made.host.put(key, encode(volume(1, node="n1", **more)))
        assert (await refused(create(made, vm=None, volume="data"))).reason == reason
    await made.host.put(key, encode(volume(1, node="n1", bound=True, holder=one.uid)))
    view = await create(made, vm=None, volume="data")
    assert (view.resource, view.source, view.node) == ("volume", "data", "n1")
    assert (await operation(made)).ref is not None


@played()
async def test_a_restore_makes_a_snapshot_of_what_it_replaces(made: World) -> None:
    one = await off(made)
    await create(made)
    assert (await refused(ask(made, "restore"))).reason == "snapshot_not_ready"
    await end(made)
    kept = await ask(made, "restore", keep_uid=KEPT)
    assert (kept.uid, kept.replaced_by, kept.state) == (KEPT, "s", "Creating")
    assert kept.name == f"before-s-{KEPT[-8:]}"
    op = await operation(made, KEPT)
    assert (op.kind, op.uid) == ("restore", one.uid)
    assert op.restored is not None
    assert op.restored.uid == ID
    again = await ask(made, "restore", keep_uid=KEPT)
    assert again.revision == kept.revision
    await end(made, KEPT)
    assert (await ask(made, "get", name=kept.name)).state == "Ready"


@played()
async def test_a_restore_needs_the_same_source_on_the_same_node(made: World) -> None:
    key = subjects.volume_record("default", "data")
    await made.host.put(key, encode(volume(1, node="n1", bound=True)))
    await create(made, vm=None, volume="data")
    await end(made)
    spec = VolumeSpec(size=volume().spec.size, protected=True)
    for changed, reason in (
        (volume(2, node="n1", bound=True), "source_gone"),
        (volume(1, node="n2", bound=True), "snapshot_elsewhere"),
        (volume(1, node="n1", bound=True, spec=spec), "protected"),
    ):
        await made.host.put(key, encode(changed))
        assert (await refused(ask(made, "restore"))).reason == reason


@played()
async def test_another_vm_or_volume_gets_the_disks_on_request(made: World) -> None:
    await off(made)
    await create(made)
    await end(made)
    other = await off(made, 2, name="web2")
    await ask(made, "restore", to="web2", keep_uid=KEPT)
    op = await operation(made, KEPT)
    assert (op.uid, op.name, op.epoch) == (other.uid, "web2", other.epoch)
    assert (await ask(made, "get", name=f"before-s-{KEPT[-8:]}")).source == "web2"
    assert (await refused(ask(made, "restore", to="none"))).reason == "vm_not_found"


@played()
async def test_nothing_of_a_snapshot_that_failed_remains(made: World) -> None:
    await off(made)
    async with releasing(made) as released:
        await create(made)
        await end(made, phase=OperationPhase.FAILED)
        assert await stored(made) is None
        assert released == [ID]
        assert (await refused(create(made))).code == 410
        await create(made, uid=uid(92))


@played()
async def test_a_delete_ends_the_operation_then_the_data_then_the_record(made: World) -> None:
    await off(made)
    async with releasing(made) as released:
        await create(made, protected=True)
        assert (await refused(ask(made, "delete"))).reason == "protected"
        await ask(made, "update", protected=False)
        running = OperationStatus(id=ID, node="n1", phase=OperationPhase.RUNNING, step="copy")
        await made.host.put(subjects.operation_status("n1", ID), encode(running))
        await settle()
        assert (await ask(made, "delete")).state == "Deleting"
        await asyncio.sleep(10)
        assert (await operation(made)).cancel
        assert (released, (await ask(made, "get")).state) == ([], "Deleting")
        assert (await refused(ask(made, "update", protected=True))).reason == "deleting"
        await end(made, phase=OperationPhase.CANCELLED)
        assert released == [ID]
        assert await stored(made) is None
        assert (await refused(ask(made, "get"))).reason == "snapshot_not_found"


@played()
async def test_a_delete_waits_for_a_node_that_is_away(made: World) -> None:
    await off(made)
    await create(made)
    await end(made)
    await ask(made, "delete")
    await asyncio.sleep(20)
    assert (await ask(made, "get")).state == "Deleting"
    async with releasing(made):
        await asyncio.sleep(20)
    assert await stored(made) is None


@played()
async def test_a_delete_between_the_two_writes_of_a_create_leaves_no_data(made: World) -> None:
    await off(made)
    accept = OperationApi.accept

    async def late(*of: Any) -> Any:
        await ask(made, "delete")
        await asyncio.sleep(2)
        return await accept(*of)

    async with releasing(made):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(OperationApi, "accept", late)
            assert (await refused(create(made))).code == Code.GONE
    entry = await made.host.get(subjects.operation_record("n1", ID))
    assert (await stored(made), entry and entry.kind) == (None, EntryKind.PURGE)


@played()
async def test_an_operation_stays_until_its_snapshot_has_the_result(made: World) -> None:
    await off(made)
    await create(made)
    done = OperationStatus(id=ID, node="n1", phase=OperationPhase.SUCCEEDED, ended_ns=1)
    await made.host.put(subjects.operation_status("n1", ID), encode(done))
    assert (await refused(made.ask("delete", "operation", id=ID))).reason == "operation_open"
    await asyncio.sleep(10)
    await made.ask("delete", "operation", id=ID)
    await asyncio.sleep(100)
    assert (await ask(made, "get")).state == "Ready"


@played()
async def test_a_snapshot_without_an_operation_is_what_its_node_has(made: World) -> None:
    await off(made)
    await create(made)
    kept = await stored(made)
    assert kept is not None
    ahead = {"created_ns": kept.created_ns + 3600 * 10**9}  # by the clock of a controller
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (7, "none", ahead),
        (8, "whole", ahead),
        (9, "replaced", ahead | {"replaced_by": "s"}),
        (6, "fresh", {}),
    ]
    ref = SnapshotRef(uid=uid(8), namespace="default", name="whole")
    async with releasing(made, HeldSnapshot(folder=ref.folder, ref=ref, uid=uid(1))) as released:
        for number, name, more in cases:
            if name == "fresh":
                await asyncio.sleep(45)
            alone = kept.model_copy(update={"uid": uid(number), "name": name} | more)
            await made.host.put(subjects.snapshot_record("default", name), encode(alone))
        await asyncio.sleep(30)
    assert (released, await stored(made, "none")) == ([uid(7)], None)
    assert (await ask(made, "get", name="whole")).state == "Ready"
    for name in ("fresh", "replaced"):
        assert (await ask(made, "get", name=name)).state == "Creating"
    assert (await ask(made, "get")).state == "Creating"


@played(controllers=2)
async def test_a_record_that_cannot_be_read_is_deleted_by_name(made: World) -> None:
    await off(made)
    await create(made)
    await end(made)
    await made.host.put(KEY, b"\xc1")
    await made.host.put(subjects.operation_record("n1", ID), b"\xc1")
    await settle()
    assert (await refused(ask(made, "get"))).reason == "unreadable"
    async with releasing(made) as released:
        assert (await ask(made, "delete")).state == "Deleting"
        await asyncio.sleep(10)
    assert (released, await stored(made)) == ([ID], None)


@played()
async def test_data_without_a_record_is_listed_and_adopted(made: World) -> None:
    ref = SnapshotRef(uid=ID, namespace="default", name="s")
    whole = HeldSnapshot(folder=ref.folder, ref=ref, uid=uid(1), name="web", size_bytes=5)
    torn = HeldSnapshot(folder=f"default.torn.{uid(8)}")

    async def inspect(request: Request) -> HeldResources:
        after = validate(Inspect, request.data).snapshots_after
        if after is None:
            return HeldResources()
        return HeldResources(snapshots=tuple(one for one in (whole, torn) if one.folder > after))

    async def audit(_: Request) -> Audited:
        return Audited()

    endpoints = [
        Endpoint("inspect", subjects.rpc("n1", "imaged", "inspect"), inspect),
        Endpoint("audit", subjects.rpc("n1", "agent", "audit"), audit),
    ]
    async with MemoryBus(made.server, "n1").serve(ServiceInfo("imaged", "1"), endpoints):
        found = (await made.ask("audit", "node"))["nodes"][0]["findings"]
        assert [(one["kind"], one["uid"]) for one in found] == [
            ("snapshot", ID),
            ("snapshot", uid(8)),
        ]
        assert "virtbus snapshot adopt s -n default --node n1" in found[0]["what"]
        view = await ask(made, "adopt", node="n1")
        assert (view.uid, view.state, view.source, view.size_bytes) == (ID, "Ready", "web", 5)
        missing = await refused(ask(made, "adopt", name="torn", node="n1"))
        assert missing.reason == "no_snapshot_data"
        assert (await made.ask("audit", "node"))["nodes"][0]["findings"][0]["uid"] == uid(8)


@played(nodes=2)
async def test_a_forgotten_node_loses_the_snapshots_that_are_named(made: World) -> None:
    key = subjects.volume_record("default", "data")
    await made.host.put(key, encode(volume(1, node="n1", bound=True)))
    await create(made, vm=None, volume="data")
    await end(made)
    await made.host.purge(key)
    await made.host.purge(subjects.node_record("n1"))
    await asyncio.sleep(120)
    error = await refused(made.ask("forget", "node", node="n1"))
    assert error.reason == "node_has_snapshots"
    await made.ask("forget", "node", node="n1", lose_snapshots=["default/s"])
    await settle()
    assert (await ask(made, "get")).state == "Lost"
    assert (await refused(ask(made, "restore"))).reason == "snapshot_lost"
    await ask(made, "delete")
    await asyncio.sleep(10)
    assert await stored(made) is None


@pytest.mark.parametrize("to", [None, "web"])
@pytest.mark.parametrize("what", ["vm", "volume"])
def test_a_restore_in_place_of_what_is_protected_is_refused(what: str, to: str | None) -> None:
    @played()
    async def scenario(made: World) -> None:
        await made.ask("create", "volume", name="data", spec={"size": "1GiB"})
        one = await off(made)
        await made.ask("attach", "volume", name="data", vm="web")
        await create(made)
        await end(made)
        key = subjects.vm_record(one.node, one.uid)

        async def protect(*, on: bool) -> None:
            if what == "volume":
                await made.ask("update", "volume", name="data", protected=on)
                return
            now = await made.stored(one.uid)
            assert now is not None
            spec = now.spec.model_copy(update={"protected": on})
            await made.host.put(key, encode(now.model_copy(update={"spec": spec})))
            await settle()

        await protect(on=True)
        error = await refused(ask(made, "restore", keep_uid=KEPT, to=to))
        command = "virtbus vm update web" if what == "vm" else "virtbus volume update data"
        assert (error.code, error.reason, command in str(error)) == (409, "protected", True)
        assert (await refused(made.ask("get", "snapshot", uid=KEPT, name="x"))).code == 404
        await protect(on=False)
        assert (await ask(made, "restore", keep_uid=KEPT, to=to)).uid == KEPT

    scenario()
