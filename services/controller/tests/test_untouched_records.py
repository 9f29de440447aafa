"""The end of a namespace's VMs, a stop, a drain and a fence leave the records of other data."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from services.controller.tests.fleets import uid
from services.controller.tests.test_departures import FREE, Site, _gone, _joined, site
from services.controller.tests.test_operation_api import RESULT
from services.controller.tests.test_volume_holders import using
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, EntryKind, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.catalogue import CHANNELS
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.wire import encode

EXPORT = uid(90)


def records() -> dict[str, Any]:
    """A volume, a snapshot, an export and a schedule of backups, all of the VM `vm1`."""
    of = {"uid": uid(1), "node": "n1", "created_ns": 1}
    export = OperationRecord(
        id=EXPORT, kind="export", resource="vm", namespace="default", name="vm1", epoch=1, **of
    )
    ended = OperationStatus(
        id=EXPORT,
        node="n1",
        phase=OperationPhase.SUCCEEDED,
        ended_ns=2**62,
        result=RESULT,
    )
    named = {"namespace": "default", "created_ns": 1}
    snapshot = SnapshotRecord(
        uid=uid(80),
        name="s",
        resource="vm",
        source="vm1",
        source_uid=uid(1),
        node="n1",
        ready=True,
        **named,
    )
    spec = {"vm": "vm1", "every_s": 3600, "keep": 1}
    schedule = BackupScheduleRecord.model_validate(
        {"uid": uid(70), "name": "nightly", "spec": spec, "next_ns": 2**62} | named
    )
    return {
        subjects.volume_record("default", "kept"): volume(60, "kept", node="n1", bound=True),
        subjects.snapshot_record("default", "s"): snapshot,
        subjects.operation_record("n1", EXPORT): export,
        subjects.operation_status("n1", EXPORT): ended,
        subjects.backup_schedule_record("default", "nightly"): schedule,
    }


@asynccontextmanager
async def untouched(there: Site) -> AsyncIterator[None]:
    """Each record stays, and no node is asked to remove data of them."""
    bus, asked = there.made.host, list[str]()

    async def remove(request: Request) -> dict[str, Any]:
        asked.append(str(request.data))
        return {}

    for key, record in records().items():
        await bus.put(key, encode(record))
    verbs = ("volume-release", "snapshot-release", "backups", "export")
    served = [Endpoint(one, subjects.rpc("n1", "imaged", one), remove) for one in verbs]
    async with MemoryBus(there.made.server, "n1").serve(ServiceInfo("imaged", "1"), served):
        yield
        await asyncio.sleep(60)
    assert asked == []
    for key in records():
        entry = await bus.get(key)
        assert entry is not None, key
        assert entry.kind is EntryKind.PUT, key


@site()
async def test_the_end_of_all_vms_of_a_namespace_leaves_its_other_data(there: Site) -> None:
    """A namespace is a name: nothing but the owners of its VMs ends them."""
    async with there.host("n1").on():
        await _joined(there, "n1")
        for number in (1, 2):
            await there.vm(number, "n1")
        async with untouched(there):
            for number in (1, 2):
                await there.made.vm("delete", uid=uid(number))
                await there.until(partial(_gone, there, number))
        await there.vm(3, "n1", **using("kept"))  # in the same namespace


def test_no_request_deletes_a_namespace() -> None:
    assert not [one for one in CHANNELS if subjects.api("namespace", "x")[:-1] in one.subject]


@site()
async def test_a_stop_a_drain_and_a_fence_leave_snapshots_exports_and_schedules(
    there: Site,
) -> None:
    async with there.host("n2").on():
        await _joined(there, "n2")
        await there.node("cordon", "n2")
        async with there.host("n1").on():
            await _joined(there, "n1")
            for number in (1, 2):
                await there.vm(number, "n1", **FREE)
            await there.node("uncordon", "n2")
            async with untouched(there):
                await there.made.vm("stop", uid=uid(1))
                await there.node("drain", "n1")
                await there.runs_on(2, "n2")
            await there.node("cordon", "n2")
            await there.node("uncordon", "n1")
            await there.made.vm("create", name="vm3", image="tiny", uid=uid(3), spec=FREE)
            await there.runs_on(3, "n1")
            await there.node("uncordon", "n2")
        async with untouched(there):
            await asyncio.sleep(30)
            await there.node("fence", "n1", confirm="it is off")
            await there.runs_on(3, "n2")
        async with there.hosts["n1"].on(), untouched(there):
            await there.node("unfence", "n1")
