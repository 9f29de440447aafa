"""Who may hold a name or a uid: the decisions of claim-then-commit (design §3 rule 2, ADR 0003).

Each decision is a function of the last message that stands on a key, so that the crash table of
the ADR is a table here too.
"""

from enum import StrEnum

from virtbus.controller.core.changes import changed_paths
from virtbus.controller.core.secret_inputs import secret_paths
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.vm import Tombstone, VmRecord

SECRETS_DIFFER = "its secret part is another"


class Standing(StrEnum):
    """What the last message over `$KV.vm.*.<uid>` says of a uid."""

    NOTHING = "nothing"
    RECORD = "record"
    TOMBSTONE = "tombstone"
    MARKER = "marker"
    """Purged: the uid was deleted and may never be committed again."""
    UNREADABLE = "unreadable"
    """Something that nobody can read; whatever it is, the uid and its name stay taken."""


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
    Standing.UNREADABLE: NameStep.REFUSE,
}

_COMMIT_STEPS: dict[Standing, CommitStep] = {
    Standing.NOTHING: CommitStep.RETRY,
    Standing.TOMBSTONE: CommitStep.MOVE,
    Standing.MARKER: CommitStep.GONE,
    Standing.UNREADABLE: CommitStep.REFUSE,
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
    if not bears(last, wanted.namespace, wanted.name):
        return CommitStep.REFUSE
    if last.deleting:
        return CommitStep.ENDING
    return CommitStep.REFUSE if differences(last, wanted) else CommitStep.SAME


def differences(last: VmRecord, wanted: VmRecord) -> tuple[Detail, ...]:
    """What a create asks for that the VM of its uid does not have, by field path.

    Of secrets only whether their digests differ: a record has no more, and an answer tells no more.
    """
    found = []
    if last.spec != wanted.spec:
        before, after = (one.spec.model_dump(mode="json") for one in (last, wanted))
        found = [
            Detail(path=path, message="is another") for path in changed_paths(before, after, "spec")
        ]
    if last.sec_digest != wanted.sec_digest:
        found += [Detail(path=path, message=SECRETS_DIFFER) for path in secret_paths(wanted.spec)]
    return tuple(found)


def unchanged(holder: VmRecord, wanted: VmRecord) -> bool:
    """True where a VM of another uid is what was asked for: a hint, as digests name their uid."""
    secret = [one.sec_digest is not None for one in (holder, wanted)]
    return holder.spec_hash == wanted.spec_hash and secret[0] == secret[1]


def name_taken(wanted: VmRecord, holder: VmRecord | Tombstone | None, uid: str) -> VirtbusError:
    """409 where another uid has the name that is wanted; `holder` is its record, if readable."""
    if isinstance(holder, VmRecord) and holder.deleting:
        message = f"{wanted.name} (uid {holder.uid}) is being deleted; repeat after vm.deleted"
        return VirtbusError(Code.CONFLICT, "deleting", message)
    if isinstance(holder, VmRecord) and unchanged(holder, wanted):
        message = f"{wanted.name} exists, unchanged, with uid {holder.uid}"
        return VirtbusError(Code.CONFLICT, "exists_unchanged", message)
    message = (
        f"the name {wanted.name} is taken in namespace {wanted.namespace} by uid {uid}; "
        "choose another, or delete that VM first"
    )
    return VirtbusError(Code.CONFLICT, "name_taken", message)


def uid_taken(wanted: VmRecord, holder: VmRecord | Tombstone | None) -> VirtbusError:
    """409 where the uid is another VM, or one not as wanted; the details say in what."""
    if isinstance(holder, VmRecord) and bears(holder, wanted.namespace, wanted.name):
        message = f"uid {wanted.uid} is {wanted.name} already, and not as asked for here"
        details = differences(holder, wanted)
        return VirtbusError(Code.CONFLICT, "uid_taken", message, details=details)
    message = f"uid {wanted.uid} belongs to another VM; leave uid out to get a new one"
    return VirtbusError(Code.CONFLICT, "uid_taken", message)
