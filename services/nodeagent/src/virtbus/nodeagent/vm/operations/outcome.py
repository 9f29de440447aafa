"""Defines the outcome of an operation on a VM."""

from dataclasses import dataclass

from virtbus.nodeagent.vm.machine import MachineEvent
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm_status import FailureStage

RETRY_S = (0.5, 10.0)
"""The shortest and the longest delay before a step is repeated."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The event that an operation ends with, and the error that explains it."""

    event: MachineEvent
    error: VirtbusError | None = None
    stage: FailureStage = "start"
    """The stage that the error stopped."""
    kind: EventKind = EventKind.VM_FAILED


def backoff_s(attempt: int) -> float:
    """Return the delay before retry `attempt` (from 1): 1, 2, 4 … 60 s."""
    return min(60.0, 2.0 ** min(max(attempt - 1, 0), 6))  # avoid the overflow at 2.0**1024
