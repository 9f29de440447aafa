"""The winner for a VM if bus and hosts differ: every kind of difference once."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, uid

from virtbus.controller.core.claims import UidState
from virtbus.controller.core.rebuild_plan import Known, RebuildAction, believed, plan, unsigned
from virtbus.schemas.node_rpc import KnownRecords
from virtbus.schemas.vm import VmRecord

A = uid(1)


def host(node: str = "n1", *records: VmRecord, gone: int = 0) -> dict[str, KnownRecords]:
    return {node: KnownRecords(node=node, records=records, removed={A: gone} if gone else {})}


def on_bus(**more: Any) -> dict[str, Known]:
    one = record(1, **more)
    return {A: Known(UidState.RECORD, one, 7, one.node)}


NEW = record(1, epoch=2, generation=3)


@pytest.mark.parametrize(
    ("reports", "bus", "silent", "step"),
    [
        (host("n1", record(1)), {}, (), RebuildAction.ADD),
        (
            host("n1", record(1)),
            {A: Known(UidState.TOMBSTONE, None, 3, "_")},
            (),
            RebuildAction.ADD,
        ),
        (host("n1", record(1)), {A: Known(UidState.MARKER, None, 3, "n1")}, (), RebuildAction.KEEP),
        (host("n1", record(1)), on_bus(), (), RebuildAction.KEEP),
        (host("n1", record(1)), on_bus(power_epoch=1), (), RebuildAction.KEEP),
        (host("n1", record(1, power_epoch=2)), on_bus(power_epoch=1), (), RebuildAction.RAISE),
        (host("n1", record(1, deleting=True)), on_bus(), (), RebuildAction.RAISE),
        (host("n1", NEW), on_bus(epoch=1, generation=9), (), RebuildAction.RAISE),
        (host("n2", record(1, node="n2", epoch=2)), on_bus(), (), RebuildAction.MOVE),
        (host("n2", record(1, node="n2", epoch=2)), on_bus(epoch=3), (), RebuildAction.KEEP),
        (host("n1", gone=1), on_bus(), (), RebuildAction.END),
        (host("n1", gone=1), on_bus(epoch=2), (), RebuildAction.KEEP),
        (host("n1", gone=1), on_bus(node="n3"), (), RebuildAction.KEEP),
        (host("n1", gone=1), on_bus(evacuating=True), (), RebuildAction.KEEP),
        (
            host("n1", gone=1) | host("n2", gone=2),
            on_bus(evacuating=True),
            (),
            RebuildAction.CONFLICT,
        ),
        (host("n1", gone=1), on_bus(), ("n9",), RebuildAction.CONFLICT),
        (
            host("n1", gone=1) | host("n2", record(1, node="n2", epoch=2)),
            on_bus(),
            (),
            RebuildAction.MOVE,
        ),
        (host("n1", record(1)) | host("n2", record(1, node="n2")), {}, (), RebuildAction.CONFLICT),
        (
            host("n1", record(1)) | host("n2", record(1, node="n2", epoch=2)),
            {},
            (),
            RebuildAction.ADD,
        ),
        ({}, on_bus(), ("n1",), RebuildAction.KEEP),
    ],
)
def test_the_newer_copy_wins_on_either_side(
    reports: dict[str, KnownRecords],
    bus: dict[str, Known],
    silent: tuple[str, ...],
    step: RebuildAction,
) -> None:
    (done,) = plan(reports, bus, silent)
    assert done.step is step


def test_the_copy_with_the_higher_epoch_of_two_hosts_is_restored() -> None:
    (done,) = plan(host("n2", record(1, node="n2", epoch=2)) | host("n1", record(1)), {}, ())
    assert (done.record.node, done.record.epoch) == ("n2", 2)


def test_a_conflict_names_the_next_step() -> None:
    (done,) = plan(host("n1", gone=1), on_bus(), ("n9",))
    assert done.why == "it left n1; start n9, then repeat"


def test_a_host_that_claims_anothers_vm_without_a_signature_gets_nothing() -> None:
    claim = record(1, node="n2", epoch=2**40)
    reports = host("n1", record(1)) | host("n2", claim)
    sure, doubtful = believed(reports, {("n1", A)}, ())
    steps = plan(sure, on_bus(), ())
    assert [step.step for step in steps] == [RebuildAction.KEEP]
    assert doubtful == [claim]
    (told,) = unsigned(doubtful, steps, on_bus())
    assert (told.step, told.record.node) == (RebuildAction.UNSIGNED, "n2")
    assert f"--accept-unsigned n2/{A}" in told.why


@pytest.mark.parametrize("accepted", ["n2", f"n2/{A}"])
def test_a_persons_acceptance_replaces_a_signature(accepted: str) -> None:
    reports = host("n2", record(1, node="n2", epoch=2))
    sure, doubtful = believed(reports, (), [accepted])
    (done,) = plan(sure, on_bus(), ())
    assert (done.step, doubtful) == (RebuildAction.MOVE, [])


def test_unsigned_copies_that_change_nothing_are_not_reported() -> None:
    reports = host("n1", record(1))
    sure, doubtful = believed(reports, (), ())
    steps = plan(sure, on_bus(), ())
    assert unsigned(doubtful, steps, on_bus()) == []
