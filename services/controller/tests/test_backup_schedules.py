"""Schedules of backups: each run is stored before it begins, and none that fails is silent."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import node, uid
from services.controller.tests.test_backup_api import DEVICE, hanging, holding, manifest
from services.controller.tests.test_operation_api import off
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core import backup_schedules
from virtbus.controller.core.backup_schedules import BackupSchedules
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupCheck, HeldBackup
from virtbus.schemas.backup_schedule import (
    BackupScheduleCreate,
    BackupScheduleRecord,
    BackupScheduleUpdate,
    BackupScheduleView,
)
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.wire import encode, read, validate

ID = uid(70)
KEY = subjects.backup_schedule_record("default", "nightly")
SPEC = {"vm": "web", "every_s": 3600, "keep": 1}
HOUR_NS = 3600 * 10**9


async def ask(made: World, verb: str, **more: Any) -> BackupScheduleView:
    asked = {"name": "nightly"} | more
    return validate(BackupScheduleView, await made.ask(verb, "backup-schedule", **asked))


async def create(made: World, **more: Any) -> BackupScheduleView:
    return await ask(made, "create", uid=ID, spec=SPEC | more)


async def stored(made: World) -> BackupScheduleRecord:
    entry = await made.host.get(KEY)
    assert entry is not None
    return read(BackupScheduleRecord, entry.value)


async def running(made: World) -> OperationRecord:
    """Wait until the run has its operation."""
    await asyncio.sleep(11)
    record = await stored(made)
    entry = await made.host.get(subjects.operation_record("n1", record.run))
    assert entry is not None
    return read(OperationRecord, entry.value)


async def end(made: World, op: OperationRecord, phase: OperationPhase, **more: Any) -> None:
    await made.hear(node("n1"))
    one = OperationStatus(id=op.id, node="n1", phase=phase, ended_ns=1, **more)
    await made.host.put(subjects.operation_status("n1", op.id), encode(one))
    await settle()
    await asyncio.sleep(11)


@played()
async def test_a_run_is_a_backup_its_verification_and_the_removal_of_old_ones(made: World) -> None:
    await off(made)
    await create(made)
    op = await running(made)
    assert (op.kind, op.name, op.schedule, op.chain) == ("backup", "web", "nightly", 8)
    assert (await ask(made, "get")).state == "Running"
    old = HeldBackup(id=uid(80), manifest=manifest(80, schedule="nightly"))
    check = BackupCheck(operation=uid(3), at_ns=7)
    new = HeldBackup(id=op.id, manifest=manifest(81, id=op.id, schedule="nightly"), check=check)
    by_hand = HeldBackup(id=uid(82), manifest=manifest(82))
    async with holding(made, old, new, by_hand) as asked:
        await end(made, op, OperationPhase.SUCCEEDED)
        verify = await running(made)
        assert (verify.kind, verify.backup, verify.uid) == ("verify", op.id, op.id)
        await end(made, verify, OperationPhase.SUCCEEDED)
        assert [one.id for one in asked if one.do == "delete"] == [uid(80)]
    view = await ask(made, "get")
    assert (view.state, view.last_backup, view.message) == ("Waiting", op.id, "")
    await made.hear(node("n1"))
    assert not (await made.ask("status", "bus")).get("alarms")


@played()
async def test_a_backup_that_stays_keeps_no_other_old_one(made: World) -> None:
    """Its increment has appeared since the list, so its delete is refused."""
    await off(made)
    await create(made, verify=False)
    op = await running(made)
    new = HeldBackup(id=op.id, manifest=manifest(84, id=op.id, schedule="nightly"))
    needed = HeldBackup(id=uid(82), manifest=manifest(82, schedule="nightly"), children=(uid(83),))
    child = HeldBackup(id=uid(83), manifest=manifest(83, schedule="nightly"))
    old = HeldBackup(id=uid(80), manifest=manifest(80, schedule="nightly"))
    async with holding(made, needed, child, old, new) as asked:
        await end(made, op, OperationPhase.SUCCEEDED)
        deleted = [one.id for one in asked if one.do == "delete"]
        assert {uid(80), uid(82), uid(83)} <= set(deleted)
        assert deleted.index(uid(82)) < len(deleted) - 1, "others were asked for after the refusal"


@played(nodes=4)
async def test_nodes_that_never_answer_delay_no_run(made: World) -> None:
    await off(made)
    await create(made, verify=False)
    op = await running(made)
    names = ("n1", "n2", "n3", "n4")
    async with hanging(made, *names):
        for name in names:
            await made.hear(node(name))
        one = OperationStatus(id=op.id, node="n1", phase=OperationPhase.SUCCEEDED, ended_ns=1)
        await made.host.put(subjects.operation_status("n1", op.id), encode(one))
        await asyncio.sleep(11)
        assert (await ask(made, "get")).state == "Waiting"
        other = schedule().model_copy(update={"name": "other", "uid": uid(71)})
        key = subjects.backup_schedule_record("default", "other")
        await made.host.put(key, encode(other))
        await asyncio.sleep(11)
        entry = await made.host.get(key)
        assert entry is not None
        assert read(BackupScheduleRecord, entry.value).run


@pytest.mark.parametrize("phase", [OperationPhase.FAILED, OperationPhase.CANCELLED])
def test_a_run_that_fails_is_an_alarm(phase: OperationPhase) -> None:
    @played()
    async def scenario(made: World) -> None:
        await off(made)
        await create(made, verify=False)
        await end(made, await running(made), phase, message="no space")
        view = await ask(made, "get")
        assert (view.state, view.message) == ("Failed", "no space")
        alarms = (await made.ask("status", "bus"))["alarms"]
        assert "default/nightly has no new backup: no space" in alarms[0]

    scenario()


@played()
async def test_a_schedule_needs_a_vm(made: World) -> None:
    asking = create(made)
    assert (await refused(asking)).reason == "vm_not_found"
    record = schedule(vm="other").model_copy(update={"uid": ID})
    await made.host.put(KEY, encode(record))
    await asyncio.sleep(11)
    assert "there is no VM named other" in (await stored(made)).failed


@played()
async def test_a_run_waits_while_its_vm_leaves_its_node(made: World) -> None:
    vm = await off(made, evacuating=True)
    await create(made)
    await asyncio.sleep(30)
    assert (await ask(made, "get")).state == "Running"
    stays = vm.model_copy(update={"evacuating": False})
    await made.host.put(subjects.vm_record("n1", vm.uid), encode(stays))
    await made.hear(node("n1"))
    assert (await running(made)).kind == "backup"


@played()
async def test_a_schedule_of_a_vm_with_a_device_of_its_node_fails(made: World) -> None:
    await off(made, spec=DEVICE)
    await create(made)
    await asyncio.sleep(11)
    assert "disk data is a device" in (await stored(made)).failed


@played()
async def test_a_schedule_is_created_once_changed_and_ended(made: World) -> None:
    await off(made)
    first = await create(made)
    assert (await create(made)).uid == first.uid
    other = ask(made, "create", uid=uid(71), spec=SPEC)
    assert (await refused(other)).reason == "name_taken"
    page = await made.ask("list", "backup-schedule")
    assert [one["name"] for one in page["items"]] == ["nightly"]
    view = await ask(made, "update", keep=9, suspended=True)
    assert (view.spec.keep, view.state, view.generation) == (9, "Suspended", 2)
    await ask(made, "delete")
    entry = await made.host.get(KEY)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    assert (await refused(ask(made, "get"))).reason == "backup_schedule_not_found"


@played()
async def test_a_value_that_cannot_be_read_is_removed_by_its_name(made: World) -> None:
    await off(made)
    await made.host.put(KEY, b"\xc1")
    await settle()
    await ask(made, "delete")
    entry = await made.host.get(KEY)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE


def schedule(**more: Any) -> BackupScheduleRecord:
    want = BackupScheduleCreate.model_validate({"name": "nightly", "spec": SPEC | more})
    return backup_schedules.made(want, ID, "", 1)


def test_times_that_have_passed_are_missed_runs() -> None:
    record = backup_schedules.begun(schedule(), uid(5), 1)
    assert (record.missed, record.next_ns) == (0, 1 + HOUR_NS)
    late = backup_schedules.begun(schedule(), uid(5), 1 + 2 * HOUR_NS + 5)
    assert (late.missed, late.next_ns) == (2, 1 + 3 * HOUR_NS)
    assert not backup_schedules.due(schedule(suspended=True), HOUR_NS)


def test_a_run_that_takes_longer_than_the_time_to_the_next_misses_that() -> None:
    record = backup_schedules.begun(schedule(), uid(5), 1)
    assert backup_schedules.overdue(record, HOUR_NS) == record
    late = backup_schedules.overdue(record, 2 + HOUR_NS)
    assert (late.missed, late.next_ns) == (1, 1 + 2 * HOUR_NS)
    assert backup_schedules.why(late) == "1 runs were missed"
    done = backup_schedules.succeeded(late, 5 + HOUR_NS)
    assert (done.missed, done.run, done.last_backup) == (0, "", uid(5))


def test_a_suspended_schedule_raises_no_alarm_and_still_shows_its_failure() -> None:
    held, record = BackupSchedules(), backup_schedules.failed(schedule(), "no space")
    held.put(KEY, encode(record), 1)
    (alarm,) = held.alarms()
    assert "nightly has no new backup: no space" in alarm
    for number, suspended in enumerate((True, False), start=2):
        want = BackupScheduleUpdate(name="nightly", suspended=suspended)
        record = backup_schedules.changed(record, want, 1)
        held.put(KEY, encode(record), number)
        assert held.alarms() == (() if suspended else (alarm,))
        (one,) = held.listed(None)
        assert backup_schedules.shown(one).message == "no space"


def test_an_update_moves_the_next_run() -> None:
    record = backup_schedules.begun(schedule(), uid(5), 1)
    want = BackupScheduleUpdate(name="nightly", every_s=7200)
    assert backup_schedules.changed(record, want, 1).next_ns == 1 + 2 * HOUR_NS
    assert backup_schedules.changed(record, BackupScheduleUpdate(name="nightly"), 1) == record


def test_an_update_to_a_shorter_interval_misses_no_run() -> None:
    begun = backup_schedules.begun(schedule(every_s=24 * 3600), uid(5), 1)
    want, now_ns = BackupScheduleUpdate(name="nightly", every_s=3600), 1 + 20 * HOUR_NS
    busy = backup_schedules.changed(begun, want, now_ns)
    assert (busy.next_ns, backup_schedules.overdue(busy, now_ns).missed) == (now_ns + HOUR_NS, 0)
    idle = backup_schedules.changed(backup_schedules.succeeded(begun, 5), want, now_ns)
    assert backup_schedules.begun(idle, uid(6), now_ns).missed == 0


def test_an_update_without_an_interval_hides_no_missed_run() -> None:
    begun = backup_schedules.begun(schedule(every_s=24 * 3600), uid(5), 1)
    want, now_ns = BackupScheduleUpdate(name="nightly", keep=9), 1 + 60 * HOUR_NS
    late = backup_schedules.changed(backup_schedules.succeeded(begun, 5), want, now_ns)
    assert backup_schedules.begun(late, uid(6), now_ns).missed == 1


def test_a_longer_interval_does_not_delay_the_first_backup() -> None:
    want = BackupScheduleUpdate(name="nightly", every_s=24 * 3600, suspended=False)
    first = backup_schedules.changed(schedule(suspended=True), want, 5)
    assert backup_schedules.due(first, 5)


def test_no_run_is_missed_while_a_schedule_is_suspended() -> None:
    suspended = schedule(suspended=True)
    want = BackupScheduleUpdate(name="nightly", suspended=False)
    now_ns = 1 + 5 * HOUR_NS
    again = backup_schedules.changed(suspended, want, now_ns)
    assert backup_schedules.due(again, now_ns)
    assert backup_schedules.begun(again, uid(5), now_ns).missed == 0
    busy = suspended.model_copy(update={"run": uid(5)})
    again = backup_schedules.changed(busy, want, now_ns)
    assert backup_schedules.overdue(again, now_ns) == again
    early = backup_schedules.changed(suspended.model_copy(update={"next_ns": HOUR_NS}), want, 5)
    assert early.next_ns == HOUR_NS
