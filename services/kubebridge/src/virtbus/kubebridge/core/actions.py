"""Actions for the edge: each is safe to repeat, and they run in order.

Writes are made at the resource version that was read. A conflict or a refusal ends the actions, and
the newer object is reconciled instead.
"""

from dataclasses import dataclass, field
from typing import Any

from virtbus.schemas.api import VmCreate

AT_ONCE_S = 0.01
"""Until the next look, where what was just done is to be seen by it."""


@dataclass(frozen=True, slots=True)
class CreateVmi:
    """Create the VMI; one of that name which is there already is as good."""

    vmi: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteVmi:
    """Delete the VMI of exactly this uid, as it was read (preconditions); absent is done."""

    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class WriteVmi:
    """Change a VMI in one write, for it has no status subresource.

    What is in `metadata` is added to the labels or takes the place of the finalizers; a `status`
    is whole, and takes the place of what was there.
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
    """`vm.create`; the refusal, if it is one, is part of what is seen next."""

    create: VmCreate


@dataclass(frozen=True, slots=True)
class BusStart:
    """`vm.start`, of a VM whose image failed for good."""

    uid: str


@dataclass(frozen=True, slots=True)
class BusDelete:
    """`vm.delete`; 404 means gone."""

    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class BusHold:
    """Mark a VM that no VMI stands for (`why`), or take the mark away (empty); nothing ends it."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """An Event on the object that is reconciled."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Reconcile anew after `after_s` seconds, though nothing changes meanwhile."""

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
    """The actions, in their order."""

    actions: list[Action] = field(default_factory=list)

    def then(self, *actions: Action) -> None:
        """Add to the end."""
        self.actions += actions
