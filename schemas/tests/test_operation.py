"""The table of operations: every end is final, and only the rows change a phase."""

from typing import get_args

import pytest

from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.operation import (
    ENDED,
    STEPS,
    TABLE,
    OperationEvent,
    OperationPhase,
    OperationRecord,
    OperationStatus,
)
from virtbus.schemas.records import of_operation, read_operation, read_operation_status
from virtbus.schemas.wire import encode

ID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
RECORD = OperationRecord(
    kind="export",
    id=ID,
    node="n1",
    namespace="default",
    resource="vm",
    uid=ID,
    name="web",
    created_ns=1,
)
STATUS = OperationStatus(id=ID, node="n1")


@pytest.mark.parametrize("phase", list(OperationPhase))
@pytest.mark.parametrize("event", get_args(OperationEvent))
def test_each_event_in_each_phase(phase: OperationPhase, event: OperationEvent) -> None:
    before = STATUS.model_copy(update={"phase": phase})
    after = before.after(event, 7)
    if phase in ENDED:
        assert after == before
    assert after.phase == TABLE.get((phase, event), phase)
    assert (after.ended_ns == 7) == (after.phase in ENDED and phase not in ENDED)


def test_every_kind_has_one_final_step_at_its_end() -> None:
    for steps in STEPS.values():
        assert [step.final for step in steps] == [False] * (len(steps) - 1) + [True]
        assert STATUS.model_copy(update={"step": steps[-1].name}).is_final
        assert not STATUS.model_copy(update={"step": steps[0].name}).is_final


def test_a_record_counts_only_at_its_own_key() -> None:
    key = subjects.operation_record("n1", ID)
    assert read_operation(key, encode(RECORD)) == RECORD
    assert of_operation(key)
    assert not of_operation(subjects.vm_record("n1", ID))
    assert not of_operation(subjects.volume_record("default", "data"))
    with pytest.raises(VirtbusError):
        read_operation(subjects.operation_record("n2", ID), encode(RECORD))
    with pytest.raises(VirtbusError):
        read_operation_status(subjects.operation_status("n2", ID), encode(STATUS))
