"""The outcome of an operation, and what operations share."""

from dataclasses import dataclass

from virtbus.nodeagent.vm.machine import Event
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.vm import VmRecord

RETRY_S = (0.5, 10.0)
"""The shortest and the longest delay before a step is repeated."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The event of an operation, and the error that explains it."""

    event: Event
    error: VirtbusError | None = None
    kind: Kind = Kind.VM_FAILED


def has_nics(record: VmRecord) -> bool:
    """Return True for a VM that needs netd."""
    return bool(record.spec.domain.devices.interfaces)
