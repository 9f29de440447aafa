"""What a record asks of its VM, given what was asked before."""

from dataclasses import dataclass, replace

from virtbus.nodeagent.core.lifecycle import UP, Event, Phase
from virtbus.schemas.vm import VmRecord

SETTLED = frozenset({Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED, *UP})
"""Where a VM stays until something happens to it, so that it must be what its record asks."""

MOVED = "the VM was moved to another node without this one"
"""Why the disks of a VM that left by a fence or a rebuild are kept."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a record that was already acted on."""

    power_epoch: int = -1
    generation: int = 0
    deleting: bool = False
    delete_grace_s: int | None = None
    powered: bool | None = None
    pause_epoch: int = -1
    runs_for: int | None = None
    """The power epoch that the last run of the guest was started for; None: it never ran."""


def taken(record: VmRecord, before: Taken) -> Taken:
    """What is acted on once `record` was, its pause apart."""
    return replace(
        before,
        power_epoch=record.power_epoch,
        generation=record.generation,
        deleting=record.ending,
        delete_grace_s=record.delete_grace_s,
        powered=record.powered,
    )


def wish(record: VmRecord, before: Taken, phase: Phase) -> Event | None:
    """The event that a record is, or None when it asks for nothing new.

    A start that came while the VM was still stopping is new until it rests, and a stop is new again
    when the VM runs all the same; a changed spec makes a VM that failed for good try again. A
    restart is new for as long as a guest of before it runs.
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
    """PAUSE for a guest that runs and should not, UNPAUSE for one that was just allowed to.

    One that others paused, of which no record ever spoke since, is left so.
    """
    if record.ending or not record.powered:
        return None
    if phase is Phase.RUNNING and record.paused:
        return Event.PAUSE
    allowed = not record.paused and record.pause_epoch > before.pause_epoch
    return Event.UNPAUSE if phase is Phase.PAUSED and allowed else None


def comes_at_rest(event: Event, before: Phase) -> bool:
    """True for what counts once the guest has ended: a restart, and a start in the midst of a stop.

    The start was posted when the halt before it had not been taken.
    """
    return (event is Event.RUN and before is Phase.STOPPING) or (
        event is Event.RESTART and before in UP
    )


def grace_s(record: VmRecord) -> int:
    """Seconds the guest gets to power itself off, by what was asked last."""
    if record.ending:
        asked = record.delete_grace_s if record.deleting else None
    else:
        asked = record.stop_grace_s
    return record.spec.termination_grace_s if asked is None else asked


def overtaken(record: VmRecord, known: VmRecord) -> bool:
    """True for a record that is older than one that this host has seen (I15)."""
    return _age(record) < _age(known)


def _age(record: VmRecord) -> tuple[int, int, int, int]:
    return record.epoch, record.generation, record.power_epoch, record.pause_epoch
