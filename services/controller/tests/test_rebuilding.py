"""The winner for a VM if bus and hosts differ: every kind of difference once."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, uid

from virtbus.controller.core.claims import Standing
from virtbus.controller.core.rebuilding import Known, Step, believed, plan, unsigned
from virtbus.schemas.nodework import KnownRecords
from virtbus.schemas.vm import VmRecord

A = uid(1)


def host(node: str = "n1", *records: VmRecord, gone: int = 0) -> dict[str, KnownRecords]:
    return {node: KnownRecords(node=node, records=records, removed={A: gone} if gone else {})}


def on_bus(**more: Any) -> dict[str, Known]:
    one = record(1, **more)
    return {A: Known(Standing.RECORD, one, 7, one.node)}


NEW = record(1, epoch=2, generation=3)


@pytest.mark.parametrize(
    ("reports", "bus", "silent", "step"),
    [
        (host("n1", record(1)), {}, (), Step.ADD),
        (host("n1", record(1)), {A: Known(Standing.TOMBSTONE, None, 3, "_")}, (), Step.ADD),
        (host("n1", record(1)), {A: Known(Standing.MARKER, None, 3, "n1")}, (), Step.KEEP),
        (host("n1", record(1)), on_bus(), (), Step.KEEP),
        (host("n1", record(1)), on_bus(power_epoch=1), (), Step.KEEP),
        (host("n1", record(1, power_epoch=2)), on_bus(power_epoch=1), (), Step.RAISE),
        (host("n1", record(1, deleting=True)), on_bus(), (), Step.RAISE),
        (host("n1", NEW), on_bus(epoch=1, generation=9), (), Step.RAISE),
        (host("n2", record(1, node="n2", epoch=2)), on_bus(), (), Step.MOVE),
        (host("n2", record(1, node="n2", epoch=2)), on_bus(epoch=3), (), Step.KEEP),
        (host("n1", gone=1), on_bus(), (), Step.END),
        (host("n1", gone=1), on_bus(epoch=2), (), Step.KEEP),
        (host("n1", gone=1), on_bus(node="n3"), (), Step.KEEP),
        (host("n1", gone=1), on_bus(leaving=True), (), Step.KEEP),
        (host("n1", gone=1) | host("n2", gone=2), on_bus(leaving=True), (), Step.CONFLICT),
        (host("n1", gone=1), on_bus(), ("n9",), Step.CONFLICT),
        (host("n1", gone=1) | host("n2", record(1, node="n2", epoch=2)), on_bus(), (), Step.MOVE),
        (host("n1", record(1)) | host("n2", record(1, node="n2")), {}, (), Step.CONFLICT),
        (host("n1", record(1)) | host("n2", record(1, node="n2", epoch=2)), {}, (), Step.ADD),
        ({}, on_bus(), ("n1",), Step.KEEP),
    ],
)
def test_the_newer_copy_wins_on_either_side(
    reports: dict[str, KnownRecords], bus: dict[str, Known], silent: tuple[str, ...], step: Step
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
    assert [step.step for step in steps] == [Step.KEEP]
    assert doubtful == [claim]
    (told,) = unsigned(doubtful, steps, on_bus())
    assert (told.step, told.record.node) == (Step.UNSIGNED, "n2")
    assert f"--accept-unsigned n2/{A}" in told.why


@pytest.mark.parametrize("accepted", ["n2", f"n2/{A}"])
def test_a_persons_acceptance_replaces_a_signature(accepted: str) -> None:
    reports = host("n2", record(1, node="n2", epoch=2))
    sure, doubtful = believed(reports, (), [accepted])
    (done,) = plan(sure, on_bus(), ())
    assert (done.step, doubtful) == (Step.MOVE, [])


def test_unsigned_copies_that_change_nothing_are_not_reported() -> None:
    reports = host("n1", record(1))
    sure, doubtful = believed(reports, (), ())
    steps = plan(sure, on_bus(), ())
    assert unsigned(doubtful, steps, on_bus()) == []
