"""What a record asks of its VM, given what was asked before."""

from dataclasses import dataclass

from virtbus.nodeagent.core.lifecycle import Event, Phase
from virtbus.schemas.vm import VmRecord

SETTLED = frozenset({Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED, Phase.RUNNING})
"""Where a VM stays until something happens to it, so that it must be what its record asks."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a record that was already acted on."""

    power_epoch: int = -1
    generation: int = 0
    deleting: bool = False
    delete_grace_s: int | None = None
    powered: bool | None = None


def taken(record: VmRecord) -> Taken:
    """What is acted on once `record` was."""
    return Taken(
        power_epoch=record.power_epoch,
        generation=record.generation,
        deleting=record.ending,
        delete_grace_s=record.delete_grace_s,
        powered=record.powered,
    )


def wish(record: VmRecord, before: Taken, phase: Phase) -> Event | None:
    """The event that a record is, or None when it asks for nothing new.

    A start that came while the VM was still stopping is new until it rests, and a stop is new again
    when the VM runs all the same; a changed spec makes a VM that failed for good try again.
    """
    if record.ending:
        again = before.deleting and before.delete_grace_s == record.delete_grace_s
        return None if again else Event.DELETE
    if not record.powered:
        halted = before.powered is False and phase is not Phase.RUNNING
        return None if halted else Event.HALT
    fresh = record.power_epoch > before.power_epoch or before.powered is not True
    changed = phase is Phase.FAILED and record.generation > before.generation
    return Event.RUN if fresh or changed else None


def grace_s(record: VmRecord) -> int:
    """Seconds the guest gets to power itself off, by what was asked last."""
    if record.ending:
        asked = record.delete_grace_s if record.deleting else None
    else:
        asked = record.stop_grace_s
    return record.spec.termination_grace_s if asked is None else asked


def overtaken(record: VmRecord, known: VmRecord) -> bool:
    """True for a record that is older than one that this host has seen (I15)."""
    return (record.epoch, record.generation, record.power_epoch) < (
        known.epoch,
        known.generation,
        known.power_epoch,
    )
