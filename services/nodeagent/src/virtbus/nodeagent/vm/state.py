"""All that the agent knows of one VM, apart from what is under way."""

from dataclasses import dataclass, field

from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.intent import Applied
from virtbus.nodeagent.vm.machine import Control, VmPhase
from virtbus.nodeagent.vm.observation import Observed
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.vm import VmRecord


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons for the state of the second table; empty where they do not apply."""

    held: str = ""
    """Nothing may be started or ended now."""
    refused: str = ""
    """This node rejects the VM."""
    terminated: str = ""
    """It has no record, and ends."""
    at_once: bool = False
    """It ends without grace, because another node may run it (I1)."""
    deleted: bool = False
    """A user's delete removed the record: its disks may be removed."""


@dataclass
class ActorState:
    """The state of one VM, which its actor changes."""

    record: VmRecord
    wanted_hash: str
    """The hash of the part of the record's spec that a running domain cannot apply."""
    image: Dependency[ImageReady]
    net: Dependency[NetReady]
    resumed: bool
    """An earlier agent had it."""
    control: Control
    reasons: Reasons
    phase: VmPhase = "new"
    observed: Observed = field(default_factory=Observed)
    applied: Applied = field(default_factory=Applied)

    @property
    def ends(self) -> bool:
        """Return True if nothing of the VM should stay."""
        return bool(self.reasons.terminated or self.reasons.refused) or self.record.ending

    @property
    def keep_reason(self) -> str:
        """Return why its disks go to the quarantine (ADR 0033).

        Empty if a user's delete allows removal.
        """
        reasons = self.reasons
        deleted = self.record.ending or reasons.deleted
        return "" if deleted else reasons.terminated or reasons.refused
