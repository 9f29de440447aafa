"""A VM's status, as its node writes it, and the VM as the API shows it."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.ids import Uid
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.resources import ResourcesInForce
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmSpec

GUEST_ENDED = "guest_ended"
"""The status's `reason` if the guest crashed, powered itself off, or was ended from outside."""
NETWORK_READY = "NetworkReady"
"""The type of a condition. It is True if the network of a VM that is off has the state that the
VM's spec names."""
FailureStage = Literal["", "image", "network", "start", "guest"]
"""The stage that a failure stopped: images and disks, the network, the start, or the guest's run.

Programs decide by the stage; `reason` is more precise, and `message` is for people.
"""


class Condition(LenientModel):
    """One aspect of a VM: its value, the reason, and the time of the last change."""

    type: str
    status: bool
    reason: str = ""
    message: str = ""
    attempt: int = 0
    since_ns: int = 0


class VmStatus(LenientModel):
    """`$KV.st.<node>.<uid>`: the state that the owning node observes.

    Written by its nodeagent only.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    node: str
    epoch: int
    generation: int
    power_epoch: int = 0
    pause_epoch: int = 0
    state: VmState
    reason: str = ""
    message: str = ""
    failure_stage: FailureStage = ""
    conditions: tuple[Condition, ...] = ()
    interfaces: tuple[InterfaceStatus, ...] = ()
    accelerator: str = ""
    image_digest: str = ""
    disk_limits: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Limits in force by disk, as libvirt reports them, with the fields of DiskLimits and Rates.

    Limits of a burst have the prefix `burst_`.
    """
    resources: ResourcesInForce | None = None
    """The limits in force of a running guest; None if the guest has no limits, or if the limits are
    not known yet."""
    disks_pending: dict[str, str] = Field(default_factory=dict)
    """By disk: the reason why the guest's disk differs from the record. The agent retries."""
    detached: tuple[str, ...] = ()
    """The disks in the `VmRecord.detaching` of `generation` that no guest has any more."""
    started_ns: int | None = None
    updated_ns: int = 0
    restarts: int = 0
    reboots: int = 0
    """Number of reboots in this run of the guest; `rebooted_ns` is the time of the last reboot."""
    rebooted_ns: int | None = None
    last_exit: GuestExit | None = None
    released: bool = False
    """True: nothing of the VM is left on the host, and the controller may purge the record."""
    refused: bool = False
    """True: the node rejected the VM for `reason`, and a controller moves it to another node."""

    @property
    def ended(self) -> bool:
        """Return True if the guest ended by itself and is not started again."""
        crashed = self.state is VmState.FAILED and self.failure_stage == "guest"
        return crashed or self.state is VmState.SUCCEEDED


class VmView(LenientModel):
    """A VM as the API shows it: record and status joined."""

    uid: Uid
    namespace: str
    name: str
    owner: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    node: str
    epoch: int
    generation: int
    revision: int
    created_ns: int
    state: VmState
    reason: str = ""
    message: str = ""
    failure_stage: FailureStage = ""
    deleting: bool = False
    powered: bool = True
    paused: bool = False
    power_observed: bool = True
    """True: the node has acted on the last start, stop, restart, pause and unpause."""
    restarts: int = 0
    reboots: int = 0
    rebooted_ns: int | None = None
    last_exit: GuestExit | None = None
    interfaces: tuple[InterfaceStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
    accelerator: str = ""
    image_digest: str = ""
    disk_limits: dict[str, dict[str, int]] = Field(default_factory=dict)
    resources: ResourcesInForce | None = None
    started_ns: int | None = None
    observed_generation: int = 0
    spec: VmSpec
    image_targets: dict[str, ImageTarget] = Field(default_factory=dict)
    """The meanings of image names on the bus at the VM's create, by the plain names in its spec."""
    cut: tuple[str, ...] = ()
    """Fields that were omitted because the view was too large for one message."""
