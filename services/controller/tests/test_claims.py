"""The complete tables of claim-then-commit."""

import pytest
from services.controller.tests.fleets import record, uid

from virtbus.controller.core.claims import (
    CommitStep,
    NameStep,
    UidState,
    commit_step,
    name_step,
    standing,
)
from virtbus.schemas.vm import Tombstone, VmRecord, VmSpec

WANTED = record(1, "web")
OTHER = record(2, "web")
TOMB = Tombstone(uid=uid(1))


@pytest.mark.parametrize(
    ("last", "purged", "expected"),
    [
        (None, False, UidState.NOTHING),
        (None, True, UidState.MARKER),
        (TOMB, False, UidState.TOMBSTONE),
        (WANTED, False, UidState.RECORD),
        (WANTED, True, UidState.MARKER),
    ],
)
def test_the_last_message_decides(
    last: VmRecord | Tombstone | None,
    purged: bool,
    expected: UidState,
) -> None:
    assert standing(last, purged=purged) is expected


@pytest.mark.parametrize(
    ("last", "purged", "step"),
    [
        (None, False, NameStep.BURY_THEN_TAKE),
        (Tombstone(uid=uid(2)), False, NameStep.BURY_THEN_TAKE),
        (None, True, NameStep.TAKE),
        (OTHER, False, NameStep.REFUSE),
        (record(2, "web", deleting=True), False, NameStep.REFUSE),
        (record(2, "db"), False, NameStep.TAKE),
        (record(2, "web", namespace="shop"), False, NameStep.TAKE),
    ],
)
def test_a_name_with_another_uids_claim_follows_the_table(
    last: VmRecord | Tombstone | None,
    purged: bool,
    step: NameStep,
) -> None:
    assert name_step(standing(last, purged=purged), last, WANTED) is step


@pytest.mark.parametrize(
    ("last", "purged", "step"),
    [
        (None, False, CommitStep.RETRY),
        (TOMB, False, CommitStep.MOVE),
        (None, True, CommitStep.GONE),
        (WANTED, False, CommitStep.SAME),
        (WANTED.model_copy(update={"node": "n2", "epoch": 4}), False, CommitStep.SAME),
        (WANTED.model_copy(update={"deleting": True}), False, CommitStep.ENDING),
        (record(1, "db"), False, CommitStep.REFUSE),
        (record(1, "web", namespace="shop"), False, CommitStep.REFUSE),
        (WANTED.model_copy(update={"spec": VmSpec()}), False, CommitStep.REFUSE),
        (WANTED.model_copy(update={"sec_digest": "other"}), False, CommitStep.REFUSE),
    ],
)
def test_a_commit_that_meets_an_earlier_message_follows_the_table(
    last: VmRecord | Tombstone | None,
    purged: bool,
    step: CommitStep,
) -> None:
    assert commit_step(standing(last, purged=purged), last, WANTED) is step


def test_every_step_is_reached() -> None:
    reached = {
        commit_step(standing(last, purged=purged), last, WANTED)
        for last, purged in [
            (None, False),
            (None, True),
            (TOMB, False),
            (WANTED, False),
            (record(1, "db"), False),
            (WANTED.model_copy(update={"deleting": True}), False),
        ]
    }
    assert reached == set(CommitStep)
