"""Derives events from a record and its last-applied state."""

from dataclasses import dataclass, replace

from virtbus.nodeagent.core.lifecycle import UP, Event, Phase
from virtbus.schemas.vm import VmRecord

SETTLED = frozenset({Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED, *UP})
"""Stable phases, in which the VM must match its record."""

MOVED = "the VM was moved to another node without this one"
"""The reason for keeping the disks of a VM that left by a fence or a rebuild."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a record that was already applied."""

    power_epoch: int = -1
    generation: int = 0
    deleting: bool = False
    delete_grace_s: int | None = None
    powered: bool | None = None
    pause_epoch: int = -1
    runs_for: int | None = None
    """The power epoch that the last run was started for; None: it never ran."""


def taken(record: VmRecord, before: Taken) -> Taken:
    """Return the applied state after `record` was applied, except for pauses."""
    return replace(
        before,
        power_epoch=record.power_epoch,
        generation=record.generation,
        deleting=record.ending,
        delete_grace_s=record.delete_grace_s,
        powered=record.powered,
    )


def wish(record: VmRecord, before: Taken, phase: Phase) -> Event | None:
    """Return the event for a record, or None if it requests nothing new.

    A start that came while the VM was stopping is pending until it has stopped. A stop is pending
    again if the VM runs anyway. A changed spec retries a VM that failed permanently. A restart is
    pending while an earlier guest runs.
    """
    if record.ending:
        again = before.deleting and before.delete_grace_s == record.delete_grace_s
        return None if again else Event.DELETE
    if not record.powered:
        halted = before.powered is False and phase not in UP
        return None if halted else Event.HALT
    if phase in UP and before.runs_for is not None and before.runs_for < record.restart_epoch:
        return Event.RESTART
    fresh = record.power_epoch > before.power_epoch or before.powered is not True
    changed = phase is Phase.FAILED and record.generation > before.generation
    return Event.RUN if fresh or changed else None


def pause_wish(record: VmRecord, before: Taken, phase: Phase) -> Event | None:
    """Return PAUSE for a running guest that should be paused, UNPAUSE for the reverse.

    A guest that others paused stays paused until the record changes.
    """
    if record.ending or not record.powered:
        return None
    if phase is Phase.RUNNING and record.paused:
        return Event.PAUSE
    allowed = not record.paused and record.pause_epoch > before.pause_epoch
    return Event.UNPAUSE if phase is Phase.PAUSED and allowed else None


def comes_at_rest(event: Event, before: Phase) -> bool:
    """Return True for events that apply after the guest has ended.

    These are a restart, and a start during a stop. The start was posted before the halt was
    applied.
    """
    return (event is Event.RUN and before is Phase.STOPPING) or (
        event is Event.RESTART and before in UP
    )


def grace_s(record: VmRecord) -> int:
    """Return the seconds for the guest's shutdown, by the last request."""
    if record.ending:
        asked = record.delete_grace_s if record.deleting else None
    else:
        asked = record.stop_grace_s
    return record.spec.termination_grace_s if asked is None else asked


def overtaken(record: VmRecord, known: VmRecord) -> bool:
    """Return True for a record that is older than one that this host has seen (I15)."""
    return _age(record) < _age(known)


def _age(record: VmRecord) -> tuple[int, int, int, int]:
    return record.epoch, record.generation, record.power_epoch, record.pause_epoch
