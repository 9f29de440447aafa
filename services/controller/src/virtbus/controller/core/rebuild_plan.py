"""Decides which record of each VM a rebuilt bus gets: the bus's own, or a host's copy (I15).

A host has a copy of the record that it acted on. The bus may have an older record (from a backup),
a newer one, or none. The copy with the higher (epoch, generation, power_epoch, pause_epoch) wins.
If these are equal, a copy of a VM that is being evacuated or deleted counts as newer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from virtbus.controller.core.claims import UidState
from virtbus.schemas.node_rpc import KnownRecords
from virtbus.schemas.vm import VmRecord


class RebuildAction(StrEnum):
    """The action for one VM."""

    ADD = "add"
    """The bus has no record: claim and commit the host's copy."""
    RAISE = "raise"
    """The bus's copy is older or unreadable: the host's copy replaces it."""
    MOVE = "move"
    """The host's copy is newer, and the bus has the record at another node's key: move it."""
    END = "end"
    """The host has released the VM since the bus's copy was made: delete the VM again."""
    KEEP = "keep"
    UNSIGNED = "unsigned"
    """A host's copy is newer, but no controller signed it: a person decides."""
    CONFLICT = "conflict"
    """The reports do not decide the outcome: a person decides."""


class Known(NamedTuple):
    """The last message of a uid on the bus.

    `record` is None if the message is no record. `node` is the node in the message's key.
    """

    where: UidState
    record: VmRecord | None = None
    revision: int = 0
    node: str = ""


class Rebuilt(NamedTuple):
    """The step for a VM. `record` is the host's copy, or the bus's copy if no host has one."""

    step: RebuildAction
    record: VmRecord
    why: str = ""


Age = tuple[int, int, int, int, bool, bool]


def age(record: VmRecord) -> Age:
    """Return a sort key for copies of a record. A newer copy has a higher key."""
    changes = record.generation, record.power_epoch, record.pause_epoch
    return record.epoch, *changes, record.evacuating, record.deleting


def best(reports: Iterable[KnownRecords]) -> tuple[dict[str, VmRecord], dict[str, str]]:
    """Return the newest copy of each VM, and a message for each VM that two hosts both claim.

    Two hosts claim a VM if their copies have the same epoch. Both results are by uid.
    """
    newest: dict[str, VmRecord] = {}
    disputed: dict[str, str] = {}
    for report in reports:
        for record in report.records:
            other = newest.get(record.uid)
            if other is None or record.epoch > other.epoch:
                newest[record.uid] = record
                disputed.pop(record.uid, None)
            elif record.epoch == other.epoch:
                if record.node != other.node:
                    disputed[record.uid] = f"{other.node} and {record.node} both have it"
                elif age(record) > age(other):
                    newest[record.uid] = record
    return newest, disputed


def left(reports: Iterable[KnownRecords]) -> dict[tuple[str, str], int]:
    """Return, by uid and node, the epochs at which VMs left their nodes."""
    return {
        (uid, report.node): epoch for report in reports for uid, epoch in report.removed.items()
    }


def was_deleted(record: VmRecord, gone: Mapping[tuple[str, str], int]) -> bool:
    """Return True if the reports show that the VM of a record on the bus was deleted.

    The record's node must have released the VM at the record's epoch or later. If the VM was
    leaving that node, any node must have released it at a later epoch.
    """
    if record.evacuating:
        return any(uid == record.uid and epoch > record.epoch for (uid, _), epoch in gone.items())
    return gone.get((record.uid, record.node), 0) >= record.epoch


def step_of(record: VmRecord, known: Known) -> Rebuilt:
    """Return the step for a VM, from its newest copy on a host and its message on the bus."""
    if known.where is UidState.MARKER:
        return Rebuilt(
            RebuildAction.KEEP, record, "it was deleted; its host ends what is left of it"
        )
    if known.where is UidState.UNREADABLE:
        step = RebuildAction.RAISE if known.node == record.node else RebuildAction.CONFLICT
        return Rebuilt(step, record, f"the bus's copy, on {known.node}, cannot be read")
    if known.record is None:
        return Rebuilt(RebuildAction.ADD, record)
    if age(known.record) >= age(record):
        return Rebuilt(RebuildAction.KEEP, record)
    if known.node == record.node:
        return Rebuilt(RebuildAction.RAISE, record)
    return Rebuilt(RebuildAction.MOVE, record, f"from {known.node}")


def believed(
    reports: Mapping[str, KnownRecords],
    good: Collection[tuple[str, str]],
    accepted: Collection[str],
) -> tuple[dict[str, KnownRecords], list[VmRecord]]:
    """Return the reports with trusted records only, and a list of all other records.

    A record is trusted if it is signed or a person has accepted it. `good` has the node and uid of
    each signed record. In `accepted`, `NODE` accepts all records of a node; `NODE/UID` accepts one.
    """
    kept: dict[str, KnownRecords] = {}
    doubtful: list[VmRecord] = []
    for node, report in reports.items():
        sure = [
            record
            for record in report.records
            if (record.node, record.uid) in good
            or not {node, f"{node}/{record.uid}"}.isdisjoint(accepted)
        ]
        doubtful += [record for record in report.records if record not in sure]
        kept[node] = report.model_copy(update={"records": tuple(sure)})
    return kept, doubtful


def unsigned(
    doubtful: Iterable[VmRecord], steps: Iterable[Rebuilt], bus: Mapping[str, Known]
) -> list[Rebuilt]:
    """Return an UNSIGNED step for each untrusted record that would change the bus if accepted."""
    settled = {step.record.uid: step.record for step in steps}
    found = []
    for record in doubtful:
        known = bus.get(record.uid, Known(UidState.NOTHING))
        other = settled.get(record.uid)
        if other is not None and age(other) >= age(record):
            continue
        if step_of(record, known).step is not RebuildAction.KEEP:
            why = (
                f"no controller of this bus has signed it; if {record.node} is to be believed: "
                f"--accept-unsigned {record.node}/{record.uid}"
            )
            found.append(Rebuilt(RebuildAction.UNSIGNED, record, why))
    return found


def plan(
    reports: Mapping[str, KnownRecords], bus: Mapping[str, Known], silent: Iterable[str]
) -> list[Rebuilt]:
    """Return a step for each VM that a host or the bus knows. The nodes `silent` did not answer.

    A VM that left its node was deleted or has moved. It counts as deleted if all nodes have
    answered and none of them has the VM.
    """
    newest, disputed = best(reports.values())
    gone = left(reports.values())
    unheard = sorted(silent)
    steps = []
    for uid in sorted({*newest, *bus}):
        known = bus.get(uid, Known(UidState.NOTHING))
        record = newest.get(uid)
        if record is not None and uid in disputed:
            steps.append(Rebuilt(RebuildAction.CONFLICT, record, disputed[uid]))
        elif record is not None:
            steps.append(step_of(record, known))
        elif known.record is not None:
            steps.append(_unheld(known.record, was_deleted(known.record, gone), unheard))
    return steps


def _unheld(record: VmRecord, was_released: bool, unheard: Sequence[str]) -> Rebuilt:
    """Return the step for a record of the bus of which no host has a copy."""
    if not was_released:
        return Rebuilt(RebuildAction.KEEP, record)
    if record.evacuating:  # another node reports the release, without a signature
        why = "it left its node, and another host says that it was deleted there"
        return Rebuilt(RebuildAction.CONFLICT, record, f"{why}: vm delete, or repeat")
    if unheard:
        why = f"it left {record.node}; start {', '.join(unheard)}, then repeat"
        return Rebuilt(RebuildAction.CONFLICT, record, why)
    return Rebuilt(RebuildAction.END, record)
