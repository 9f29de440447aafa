"""Who may hold a name or a uid: the decisions of claim-then-commit (design §3 rule 2, ADR 0003).

Each decision is a function of the last message that stands on a key, so that the crash table of
the ADR is a table here too.
"""

from enum import StrEnum

from virtbus.schemas.vm import Tombstone, VmRecord


class Standing(StrEnum):
    """What the last message over `$KV.vm.*.<uid>` says of a uid."""

    NOTHING = "nothing"
    RECORD = "record"
    TOMBSTONE = "tombstone"
    MARKER = "marker"
    """Purged: the uid was deleted and may never be committed again."""


class NameStep(StrEnum):
    """What to do about a name that another uid claims."""

    REFUSE = "refuse"
    BURY_THEN_TAKE = "bury then take"
    """Put a tombstone first, so that a paused controller can no longer commit the other uid."""
    TAKE = "take"


class CommitStep(StrEnum):
    """What to do when the commit of a uid met an earlier message."""

    SAME = "same"
    """It is there already: answer 200."""
    ENDING = "ending"
    """It is there and being deleted: 409."""
    REFUSE = "refuse"
    MOVE = "move"
    """Commit as a move from `_`: purge the tombstone in the same atomic batch."""
    GONE = "gone"
    RETRY = "retry"


_NAME_STEPS: dict[Standing, NameStep] = {
    Standing.NOTHING: NameStep.BURY_THEN_TAKE,
    Standing.RECORD: NameStep.REFUSE,
    Standing.TOMBSTONE: NameStep.BURY_THEN_TAKE,
    Standing.MARKER: NameStep.TAKE,
}

_COMMIT_STEPS: dict[Standing, CommitStep] = {
    Standing.NOTHING: CommitStep.RETRY,
    Standing.TOMBSTONE: CommitStep.MOVE,
    Standing.MARKER: CommitStep.GONE,
}


def standing(last: VmRecord | Tombstone | None, *, purged: bool) -> Standing:
    """Classify the last message; `last` None and not `purged` is an empty key."""
    if purged:
        return Standing.MARKER
    if last is None:
        return Standing.NOTHING
    return Standing.TOMBSTONE if isinstance(last, Tombstone) else Standing.RECORD


def name_step(where: Standing, last: VmRecord | Tombstone | None, wanted: VmRecord) -> NameStep:
    """What to do about the claim on `wanted`'s name of another uid, given what stands on that.

    A uid whose record bears another name can never be committed under this one.
    """
    if isinstance(last, VmRecord) and not bears(last, wanted.namespace, wanted.name):
        return NameStep.TAKE
    return _NAME_STEPS[where]


def bears(record: VmRecord, namespace: str, name: str) -> bool:
    """True for a record of this name."""
    return (record.namespace, record.name) == (namespace, name)


def commit_step(where: Standing, last: VmRecord | Tombstone | None, wanted: VmRecord) -> CommitStep:
    """What a commit of `wanted` does, given what stands on its uid."""
    if where is not Standing.RECORD or not isinstance(last, VmRecord):
        return _COMMIT_STEPS[where]
    if not bears(last, wanted.namespace, wanted.name) or last.spec_hash != wanted.spec_hash:
        return CommitStep.REFUSE
    return CommitStep.ENDING if last.deleting else CommitStep.SAME
