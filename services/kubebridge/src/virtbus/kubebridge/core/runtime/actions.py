"""Defines the actions of a reconcile. Each is safe to repeat, and they run in order.

Writes are made at the resource version that was read. A conflict or a refusal ends the actions, and
the newer object is reconciled instead.
"""

from dataclasses import dataclass, field
from typing import Any

from virtbus.schemas.api import VmCreate

AT_ONCE_S = 0.01
"""Seconds before the next reconcile if it needs the result of this one."""


@dataclass(frozen=True, slots=True)
class CreateVmi:
    """Create the VMI. An existing one of that name counts as success."""

    vmi: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteVmi:
    """Delete the VMI of this uid at the version that was read. A missing one counts as success."""

    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class WriteVmi:
    """Change a VMI in one write, because it has no status subresource.

    Labels in `metadata` are added; finalizers are replaced. `status` replaces the whole status.
    """

    patch: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WriteVm:
    """Patch a VM: its finalizers or its run strategy."""

    patch: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WriteVmStatus:
    """Replace the VM's status subresource."""

    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BusCreate:
    """Send `vm.create`. A refusal is an input of the next reconcile."""

    create: VmCreate


@dataclass(frozen=True, slots=True)
class BusStart:
    """Send `vm.start` for a VM whose image failed permanently."""

    uid: str


@dataclass(frozen=True, slots=True)
class BusDelete:
    """Send `vm.delete`. 404 means that the VM is gone."""

    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class BusHold:
    """Mark a VM that has no VMI with the reason `why`, or remove the mark if `why` is empty.

    The VM continues to run.
    """

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Record an Event on the reconciled object."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Reconcile again after `after_s` seconds, even if nothing changes."""

    after_s: float


Action = (
    CreateVmi
    | DeleteVmi
    | WriteVmi
    | WriteVm
    | WriteVmStatus
    | BusCreate
    | BusStart
    | BusDelete
    | Tell
    | LookAgain
)


@dataclass(slots=True)
class Plan:
    """A list of actions in their order."""

    actions: list[Action] = field(default_factory=list)

    def then(self, *actions: Action) -> None:
        """Append actions."""
        self.actions += actions
