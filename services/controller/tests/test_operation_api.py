"""The API of operations as a client sees it, and what the leader does with them."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.ports import Endpoint, EntryKind, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeState
from virtbus.schemas.node_rpc import VolumeRelease, VolumeReleased
from virtbus.schemas.operation import (
    ExportResult,
    OperationPhase,
    OperationRecord,
    OperationStatus,
)
from virtbus.schemas.operation_api import OperationView
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import JoinNonce, VmRecord
from virtbus.schemas.wire import encode, read, validate

ID = uid(90)
KEY = subjects.operation_record("n1", ID)
STATUS = subjects.operation_status("n1", ID)
RESULT = ExportResult(path="/x", size_bytes=5, digest=f"sha256:{'5' * 64}")
DAY_NS = 86_400 * 10**9


async def off(made: World, number: int = 1, **more: Any) -> VmRecord:
    """A VM that is off, as a controller and its node store it."""
    one = record(number, powered=False, **more)
    await made.host.put(subjects.name_claim("default", one.name), encode({"uid": one.uid}))
    await made.host.put(subjects.vm_record("n1", one.uid), encode(one))
    await made.say(status(one, VmState.STOPPED))
    await settle()
    return one


async def export(made: World, **more: Any) -> OperationView:
    asked = {"vm": "web", "id": ID} | more
    return validate(OperationView, await made.ask("export", "operation", **asked))


async def of(made: World, verb: str, id_: str = ID) -> OperationView:
    return validate(OperationView, await made.ask(verb, "operation", id=id_))


async def say(made: World, phase: OperationPhase, **more: Any) -> None:
    """Write a status as the node does."""
    one = OperationStatus(id=ID, node="n1", phase=phase, **more)
    await made.host.put(STATUS, encode(one))
    await settle()


async def stored(made: World) -> OperationRecord | None:
    entry = await made.host.get(KEY)
    return None if entry is None or not entry.value else read(OperationRecord, entry.value)


@played()
async def test_an_export_of_a_vm_that_is_off_is_accepted(made: World) -> None:
    one = await off(made)
    view = await export(made, format="raw")
    assert (view.phase, view.disk, view.node, view.uid) == ("Accepted", "root", "n1", one.uid)
    assert (view.format, view.expires_ns) == ("raw", 0)
    kept = await stored(made)
    assert kept is not None
    assert (kept.epoch, kept.owner, kept.cancel) == (one.epoch, "", False)
    assert await export(made, format="raw") == view
    assert (await refused(export(made))).reason == "id_taken"
    found = await made.client.history(subjects.events(one.uid))
    assert [m.subject.split(".", 4)[4] for m in found] == ["operation.accepted"]


@played()
async def test_progress_and_result_are_shown(made: World) -> None:
    await off(made)
    await export(made)
    await say(made, OperationPhase.RUNNING, done_bytes=1, total_bytes=4, step="convert")
    view = await of(made, "get")
    assert (view.phase, view.done_bytes, view.total_bytes) == ("Running", 1, 4)
    await say(made, OperationPhase.SUCCEEDED, result=RESULT, ended_ns=5)
    page = await made.ask("list", "operation", namespace="default")
    assert [item["result"]["size_bytes"] for item in page["items"]] == [5]
    assert (await of(made, "get")).expires_ns == 5 + DAY_NS
    assert (await made.ask("list", "operation", namespace="other"))["items"] == []


@pytest.mark.parametrize(
    "case", ["runs", "silent", "unknown vm", "no disk", "unplaced", "evacuating", "deleting"]
)
def test_refusals(case: str) -> None:
    wanted = {
        "runs": "vm_runs",
        "silent": "node_silent",
        "unknown vm": "vm_not_found",
        "no disk": "no_disk",
        "unplaced": "unplaced",
        "evacuating": "unplaced",
        "deleting": "deleting",
    }

    @played()
    async def scenario(made: World) -> None:
        if case == "unplaced":
            one = record(1, powered=False, node="_")
            await made.host.put(subjects.name_claim("default", "web"), encode({"uid": one.uid}))
            await made.host.put(subjects.vm_record("_", one.uid), encode(one))
        elif case != "unknown vm":
            one = await off(made, **{case: True} if case in {"evacuating", "deleting"} else {})
            if case == "runs":
                await made.say(status(one, VmState.RUNNING))
            if case == "silent":
                away = node("n1", state=NodeState.RECOVERING)
                await made.host.put(subjects.node_record("n1"), encode(away))
        await settle()
        asking = export(made, **({"disk": "other"} if case == "no disk" else {}))
        assert (await refused(asking)).reason == wanted[case]
        assert await stored(made) is None

    scenario()


@played()
async def test_a_request_names_one_disk(made: World) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"vm": None}, "vm"),
        ({"volume": "data"}, "vm"),
        ({"vm": None, "volume": "data", "disk": "root"}, "disk"),
    ]
    for more, path in cases:
        error = await refused(export(made, **more))
        assert (error.code, error.body.details[0].path) == (400, path)


@played()
async def test_a_volume_is_exported_while_nobody_holds_it(made: World) -> None:
    key = subjects.volume_record("default", "data")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "volume_empty"),
        ({"bound": True, "node": "n1", "holder": uid(3)}, "volume_in_use"),
        ({"bound": True, "node": "n1", "deleting": True}, "deleting"),
        ({"bound": True, "node": "n1", "lost": True}, "volume_lost"),
    ]
    for more, reason in cases:
        await made.host.put(key, encode(volume(1, **more)))
        found = await refused(export(made, vm=None, volume="data"))
        assert found.reason in {reason, "volume_lost", "volume_empty"}
    await made.host.put(key, encode(volume(1, bound=True, node="n1")))
    view = await export(made, vm=None, volume="data")
    assert (view.resource, view.name, view.node) == ("volume", "data", "n1")


@played()
async def test_a_cancel_before_the_begin_ends_it_at_once(made: World) -> None:
    await off(made)
    await export(made)
    assert (await of(made, "cancel")).phase == "Cancelled"
    assert (await refused(of(made, "cancel"))).reason == "operation_ended"
    kept = await stored(made)
    assert kept is not None
    assert not kept.cancel


@played()
async def test_a_cancel_of_running_work_asks_the_node(made: World) -> None:
    await off(made)
    await export(made)
    await say(made, OperationPhase.RUNNING, step="convert")
    view = await of(made, "cancel")
    assert (view.phase, view.cancel, view.message) == ("Running", True, "it is being cancelled")
    assert await of(made, "cancel") == view
    await say(made, OperationPhase.RUNNING, step="publish")
    assert (await refused(of(made, "cancel"))).reason == "operation_final"


@played()
async def test_ended_operations_are_deleted_and_open_ones_are_not(made: World) -> None:
    await off(made)
    await export(made)
    assert (await refused(of(made, "delete"))).reason == "operation_open"
    await say(made, OperationPhase.FAILED, ended_ns=1)
    await of(made, "delete")
    await settle()
    for key in (KEY, STATUS):
        entry = await made.host.get(key)
        assert entry is not None
        assert entry.kind is EntryKind.PURGE
    assert (await refused(of(made, "get"))).reason == "operation_not_found"
    assert (await refused(export(made))).code == 410
    assert (await made.ask("list", "operation"))["items"] == []


async def later(made: World) -> None:
    """Wait until the leader has swept; the node is there after it."""
    await asyncio.sleep(150)
    await made.hear(node("n1"))
    await settle()


@played()
async def test_ended_operations_make_room_for_new_ones(made: World) -> None:
    await off(made)
    for number in range(100):
        await export(made, id=uid(1000 + number))
    full = await refused(export(made))
    assert (full.code, full.reason) == (429, "operation_quota")
    ended_ns = made.host.sources.time_ns() - 120 * 10**9
    for number in (7, 3, 5):
        how = {"phase": OperationPhase.SUCCEEDED, "ended_ns": ended_ns}
        one = OperationStatus(id=uid(1000 + number), node="n1", **how)
        await made.host.put(subjects.operation_status("n1", one.id), encode(one))
    await later(made)
    await of(made, "get", uid(1003))  # the namespace has no more than it may have
    for number in (90, 91):
        await export(made, id=uid(number))
    await later(made)
    for number in (3, 5):  # the oldest of those that have ended
        assert (await refused(of(made, "get", uid(1000 + number)))).reason == "operation_not_found"
    await of(made, "get", uid(1007))
    await export(made, id=uid(92))
    assert (await refused(export(made, id=uid(93)))).reason == "operation_quota"


@played()
async def test_results_are_removed_after_a_day(made: World) -> None:
    await off(made)
    await export(made)
    now_ns = made.host.sources.time_ns()
    await say(made, OperationPhase.SUCCEEDED, result=RESULT, ended_ns=now_ns)
    await asyncio.sleep(60)
    assert await stored(made) is not None
    await say(made, OperationPhase.SUCCEEDED, result=RESULT, ended_ns=now_ns - DAY_NS - 1)
    await asyncio.sleep(60)
    assert await stored(made) is None
    entry = await made.host.get(STATUS)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE


@played()
async def test_operations_of_a_forgotten_node_fail_and_of_a_silent_one_wait(made: World) -> None:
    await off(made)
    await export(made)
    await made.host.put(subjects.join_nonce("n1"), encode(JoinNonce(nonce="x")))
    await made.host.purge(subjects.node_record("n1"))
    for fleet in made.controllers.values():
        fleet._fleet.nodes.pop("n1", None)
    await asyncio.sleep(60)
    assert (await of(made, "get")).phase == "Accepted"
    await made.host.purge(subjects.join_nonce("n1"))
    await asyncio.sleep(60)
    view = await of(made, "get")
    assert view.error is not None
    assert (view.phase, view.error.reason) == ("Failed", "node_forgotten")


@played()
async def test_a_delete_of_a_volume_cancels_its_export(made: World) -> None:
    key = subjects.volume_record("default", "data")
    one = volume(1, bound=True, node="n1")
    await made.host.put(key, encode(one))
    await export(made, vm=None, volume="data")
    await say(made, OperationPhase.RUNNING, step="convert")
    seen: list[bool] = []

    async def release(request: Request) -> VolumeReleased:
        validate(VolumeRelease, request.data)
        kept = await stored(made)
        seen.append(kept is not None and kept.cancel)
        return VolumeReleased(found=True)

    subject = subjects.rpc("n1", "imaged", "volume-release")
    served = [Endpoint("release", subject, release)]
    async with made.host.serve(ServiceInfo("virtbus-imaged", "1"), served):
        await made.ask("delete", "volume", name="data")
        await asyncio.sleep(20)
    assert seen == [True]
    entry = await made.host.get(key)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE


@played(controllers=2)
async def test_an_operation_that_cannot_be_read_stops_nobody(made: World) -> None:
    await off(made)
    await made.host.put(KEY, b"\xc1")
    await made.host.put(STATUS, b"\xc1")
    await settle()
    view = await export(made, id=uid(91))
    assert view.phase == "Accepted"
    assert (await refused(of(made, "get"))).reason == "unreadable"


@played()
async def test_a_merge_of_layers_is_an_operation_of_a_vm_that_is_off_or_runs(made: World) -> None:
    one = await off(made)
    for _ in range(2):  # it may be repeated
        view = await made.ask("flatten", "operation", vm="web", id=ID)
        assert (view["kind"], view["name"], view.get("disk", "")) == ("flatten", "web", "")
    await made.say(status(one, VmState.STARTING))
    await settle()
    asking = made.ask("flatten", "operation", vm="web", id=uid(91))
    assert (await refused(asking)).reason == "vm_runs"
    await made.say(status(one, VmState.RUNNING))
    await settle()
    assert (await made.ask("flatten", "operation", vm="web", id=uid(91)))["id"] == uid(91)
    assert (await refused(made.ask("flatten", "operation", id=uid(92)))).code == 400


@played()
async def test_the_layers_of_a_volume_are_merged_while_its_vm_is_off(made: World) -> None:
    one = await off(made)
    held = volume(1, node="n1", bound=True, holder=one.uid)
    await made.host.put(subjects.volume_record("default", "data"), encode(held))
    await settle()
    view = await made.ask("flatten", "operation", volume="data", id=ID)
    assert (view["kind"], view["name"], view["uid"]) == ("flatten", "data", held.uid)
    await made.say(status(one, VmState.RUNNING))
    await settle()
    error = await refused(made.ask("flatten", "operation", volume="data", id=uid(91)))
    assert (error.reason, "virtbus vm stop web" in str(error)) == ("volume_in_use", True)
