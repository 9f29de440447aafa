"""The ended operations that make room for new ones, and those that something still needs."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.operation_surplus import KEPT_NS, surplus
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.operation_sweep import OperationSweep
from virtbus.schemas import subjects
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.snapshot import SnapshotRecord, SnapshotRef
from virtbus.schemas.volume import FillState, VolumeFill, VolumeMove, VolumeRecord
from virtbus.schemas.volume_ref import FillSource
from virtbus.schemas.wire import encode

NONE = Quota(0, 0)
NOW_NS = 10 * KEPT_NS


def put(fleet: Fleet, number: int, ended_ns: int | None = 0, **more: Any) -> None:
    """Put an operation of the volume `data`, ended at a time; None: open."""
    values = {"kind": "export", "resource": "volume", "uid": uid(1), "name": "data"}
    one = OperationRecord.model_validate(
        {"id": uid(number), "node": "n1", "namespace": "default", "created_ns": number}
        | values
        | more
    )
    fleet.operations.put(subjects.operation_record("n1", one.id), encode(one), number)
    phase = OperationPhase.RUNNING if ended_ns is None else OperationPhase.SUCCEEDED
    status = OperationStatus(id=one.id, node="n1", phase=phase, ended_ns=ended_ns or 0)
    fleet.operations.put(subjects.operation_status("n1", one.id), encode(status), number)


def found(fleet: Fleet, quota: Quota = NONE) -> list[str]:
    return [held.record.id for held in surplus(fleet, quota, NOW_NS)]


def store(fleet: Fleet, one: VolumeRecord) -> None:
    fleet.volumes.put(subjects.volume_record(one.namespace, one.name), encode(one), 1)


def test_the_oldest_go_first_and_open_and_new_ones_stay() -> None:
    fleet = Fleet()
    put(fleet, 10, None)
    put(fleet, 11, NOW_NS - 1)
    for number in (12, 13, 14):
        put(fleet, number)
    put(fleet, 15, namespace="shop")
    assert found(fleet) == [uid(number) for number in (12, 13, 14, 15)]
    assert found(fleet, Quota(3, 100)) == [uid(12), uid(13)]
    assert found(fleet, Quota(100, 5)) == [uid(12)]
    assert found(fleet, Quota(5, 6)) == []
    assert (fleet.operations.count("default"), fleet.operations.count("shop")) == (1, 0)


def test_those_that_ended_first_go_first_whenever_they_began() -> None:
    fleet = Fleet()
    for number, ended_ns in ((10, 30), (11, 10), (12, 20)):
        put(fleet, number, ended_ns)
    assert found(fleet) == [uid(11), uid(12), uid(10)]
    assert found(fleet, Quota(2, 100)) == [uid(11)]


def test_open_operations_are_counted_as_their_statuses_and_records_come_and_go() -> None:
    fleet = Fleet()
    put(fleet, 10, None)
    put(fleet, 11, None)
    assert (fleet.operations.count("default"), fleet.operations.count()) == (2, 2)
    put(fleet, 10)
    assert fleet.operations.count("default") == 1
    fleet.operations.forget(subjects.operation_record("n1", uid(11)))
    assert (fleet.operations.count("default"), fleet.operations.count()) == (0, 0)
    fleet.operations.forget(subjects.operation_status("n1", uid(10)))
    assert fleet.operations.count() == 1, "without a status it has not begun"


def test_the_operations_of_a_volume_stay_while_it_moves_or_is_filled() -> None:
    for change, kept in (
        ({"move": VolumeMove(source="n1", target="n2", export=uid(10), fill=uid(11))}, True),
        ({"move": None}, False),
        ({"fill": _fill(FillState.FILLING)}, True),
        ({"fill": _fill(FillState.FILLED)}, False),
    ):
        fleet = Fleet()
        store(fleet, volume(1, bound=True, node="n1", **change))
        put(fleet, 10)
        assert found(fleet) == ([] if kept else [uid(10)]), change


def _fill(state: FillState) -> VolumeFill:
    return VolumeFill(operation=uid(10), state=state, source=FillSource())


def test_the_operation_of_a_snapshot_stays_until_the_snapshot_has_its_result() -> None:
    for ready in (False, True):
        fleet = Fleet()
        one = SnapshotRecord(
            uid=uid(10),
            namespace="default",
            name="before",
            resource="volume",
            source="data",
            source_uid=uid(1),
            node="n1",
            ready=ready,
            created_ns=1,
        )
        key = subjects.snapshot_record("default", "before")
        fleet.volumes.snapshots.put(key, encode(one), 1)
        ref = SnapshotRef(uid=uid(10), namespace="default", name="before")
        put(fleet, 10, kind="snapshot", snapshot=ref)
        assert found(fleet) == ([uid(10)] if ready else [])


@pytest.mark.parametrize("state", list(FillState))
async def test_an_operation_outlives_its_retention_while_a_volume_waits_for_it(
    state: FillState,
) -> None:
    bus, fleet = MemoryBus(MemoryServer()), Fleet()
    store(fleet, volume(1, bound=True, node="n1", fill=_fill(state)))
    put(fleet, 10, 1)
    (held,) = fleet.operations.all()
    key = subjects.operation_record("n1", uid(10))
    fleet.operations.put(key, encode(held.record), await bus.put(key, encode(held.record)))
    term = LeaderTerm("test", 1, asyncio.get_running_loop().time() + 60)
    await OperationSweep(bus, fleet, 60, Quota(100, 100)).round(term)
    entry = await bus.get(key)
    assert entry is not None
    assert (entry.kind is EntryKind.PUT) == (state is FillState.FILLING)
