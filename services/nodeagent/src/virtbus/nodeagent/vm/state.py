"""Defines the state that an actor keeps for its VM."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.nodeagent.core.guest_nics import GuestNic
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.intent import Applied, forced
from virtbus.nodeagent.vm.machine import Control, VmPhase
from virtbus.nodeagent.vm.observation import Observed
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.vm import VmRecord


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons for the VM's `Control` (`machine.py`). A reason that does not apply is empty."""

    held: str = ""
    """The reason why nothing may be started or ended now."""
    refused: str = ""
    """The reason why this node rejects the VM."""
    terminated: str = ""
    """The reason why the VM, which has no record, ends."""
    at_once: bool = False
    """True if the VM ends without grace, because another node may run it (I1)."""
    deleted: bool = False
    """True if a user's delete removed the record, so that the VM's disks may be removed."""


@dataclass
class ActorState:
    """The state of one VM, which its actor changes."""

    record: VmRecord
    wanted_hash: str
    """`metadata.domain_hash` of the record. A running guest with another hash needs a restart."""
    wanted_disks: Mapping[str, str]
    """`metadata.disk_hashes` of the record. A running guest with other hashes needs a restart."""
    wanted_nics: dict[str, GuestNic]
    """The NICs of a guest that is started for the record, by name."""
    image: Dependency[ImageReady]
    net: Dependency[NetReady]
    resumed: bool
    """True if the VM was on this host before the agent's start."""
    control: Control
    reasons: Reasons
    phase: VmPhase = "new"
    observed: Observed = field(default_factory=Observed)
    applied: Applied = field(default_factory=Applied)
    disks_changed: SmallEvent = field(default_factory=SmallEvent)
    """Set when the disks of the running guest should change."""

    @property
    def ends(self) -> bool:
        """Return True if nothing of the VM should stay on this node."""
        return bool(self.reasons.terminated or self.reasons.refused) or self.record.ending

    @property
    def forced(self) -> bool:
        """Return True if the guest must end even if libvirt has lost it."""
        return self.reasons.at_once or forced(self.record)

    @property
    def keep_reason(self) -> str:
        """Return why the VM's disks go to the quarantine (ADR 0033).

        Empty if a user's delete allows removal.
        """
        reasons = self.reasons
        deleted = self.record.ending or reasons.deleted
        return "" if deleted else reasons.terminated or reasons.refused
