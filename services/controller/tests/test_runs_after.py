"""The power state of a VM on its next node: an accepted start survives the move (I2)."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, status

from virtbus.controller.core.evacuation import runs_after
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy, VmRecord
from virtbus.schemas.vm_status import GUEST_ENDED, VmStatus


def by_hand(**more: Any) -> VmRecord:
    made = record(1, **more)
    spec = made.spec.model_copy(update={"run_strategy": RunStrategy.MANUAL})
    return made.model_copy(update={"spec": spec})


@pytest.mark.parametrize(
    ("told", "runs"),
    [
        (None, True),
        (status(by_hand(), VmState.PREPARING), True),
        (status(by_hand(), VmState.FAILED, reason="source_down"), True),
        (status(by_hand(), VmState.FAILED, reason=GUEST_ENDED, failure_stage="guest"), False),
        (status(by_hand(), VmState.SUCCEEDED), False),
    ],
)
def test_only_a_guest_that_ended_by_itself_stays_off(told: VmStatus | None, runs: bool) -> None:
    assert runs_after(by_hand(), told) is runs


@pytest.mark.parametrize("state", [VmState.SUCCEEDED, VmState.FAILED])
def test_an_end_before_the_last_start_no_longer_counts(state: VmState) -> None:
    before = status(by_hand(), state, reason=GUEST_ENDED, failure_stage="guest")
    assert runs_after(by_hand(power_epoch=1), before)
    assert runs_after(by_hand(epoch=2), before)
