"""A bus restored to before a restore of disks, or before a run of a schedule, loses no data.

`tests/sim/test_restored_volumes.py` has the changes of a volume's holder.
"""

import asyncio

import pytest
from services.controller.tests import test_backup_schedules as schedules
from services.controller.tests.fleets import node, uid
from services.controller.tests.test_backup_api import holding, manifest
from services.controller.tests.test_operation_api import off
from services.controller.tests.test_snapshot_api import (
    KEPT,
    ask,
    create,
    end,
    operation,
    releasing,
)
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupCheck, HeldBackup
from virtbus.schemas.node_rpc import HeldSnapshot
from virtbus.schemas.operation import OperationPhase
from virtbus.schemas.snapshot import SnapshotRef

STREAMS = ("KV_vm", "KV_st")
HOUR_S = 3600.0


def copied(made: World) -> dict[str, list[Entry]]:
    """Return a backup of the bus."""
    return {name: list(made.server.shelves[name].entries.values()) for name in STREAMS}


async def restored(made: World, backup: dict[str, list[Entry]]) -> None:
    """Restore a backup; what it lacks is gone."""
    for name, entries in backup.items():
        there = {entry.key for entry in entries}
        for key in made.server.shelves[name].entries.keys() - there:
            await made.host.purge(key)
        for entry in entries:
            if entry.kind is EntryKind.PUT:
                await made.host.put(entry.key, entry.value)
    await settle()
    await made.hear(node("n1"))


@pytest.mark.parametrize("taken", ["before", "during"])
def test_a_bus_older_than_a_restore_keeps_the_replaced_disks(taken: str) -> None:
    @played()
    async def scenario(made: World) -> None:
        one = await off(made)
        await create(made)
        await end(made)
        backup = copied(made)
        await ask(made, "restore", keep_uid=KEPT, keep="kept")
        if taken == "during":
            backup = copied(made)
        await end(made, KEPT)
        assert (await ask(made, "get", name="kept")).state == "Ready"
        await restored(made, backup)
        ref = SnapshotRef(uid=KEPT, namespace="default", name="kept")
        there = HeldSnapshot(folder=ref.folder, ref=ref, uid=one.uid, name="web", size_bytes=7)
        async with releasing(made, there) as released:
            for _ in range(20):
                await made.hear(node("n1"))
                await asyncio.sleep(30)
            assert released == []
            if taken == "during":  # its node ends the operation again, which changes nothing there
                assert (await operation(made, KEPT)).kind == "restore"
                await end(made, KEPT)
            else:
                missing = await refused(ask(made, "get", name="kept"))
                assert missing.reason == "snapshot_not_found"
                await ask(made, "adopt", name="kept", node="n1")
            assert (await ask(made, "get", name="kept")).state == "Ready"
            assert (await ask(made, "get")).state == "Ready"

    scenario()


@pytest.mark.parametrize("taken", ["before the schedule", "before the run", "during the run"])
def test_a_bus_older_than_a_run_of_a_schedule_keeps_the_last_verified_backup(taken: str) -> None:
    @played()
    async def scenario(made: World) -> None:
        await off(made)
        backups = {"before the schedule": copied(made)}
        await schedules.create(made)
        backups["before the run"] = copied(made)
        first = await schedules.running(made)
        backups["during the run"] = copied(made)
        made_first = HeldBackup(
            id=first.id,
            manifest=manifest(80, id=first.id, schedule="nightly"),
            check=BackupCheck(operation=uid(3), at_ns=7),
        )
        async with holding(made, made_first) as asked:
            await schedules.end(made, first, OperationPhase.SUCCEEDED)
            verify = await schedules.running(made)
            await schedules.end(made, verify, OperationPhase.SUCCEEDED)
            await restored(made, backups[taken])
            if taken == "before the schedule":
                await schedules.create(made)
            second = await schedules.running(made)
            assert (second.kind, second.id == first.id) == ("backup", taken == "during the run")
            await schedules.end(made, second, OperationPhase.FAILED, message="no space")
            await asyncio.sleep(HOUR_S / 2)
            assert [one.id for one in asked if one.do == "delete"] == []
            entry = await made.host.get(subjects.operation_record("n1", second.id))
            assert entry is not None

    scenario()
