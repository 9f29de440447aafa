"""Defines a pod as virtbus-cri stores it: its sandboxes, its containers and its VM.

Each pod has one file, so each change of a pod is atomic. After a kill of virtbus-cri, the file has
the pod either before or after the change.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal, TypeVar

from virtbus.cri.core.configs import ContainerConfig, SandboxConfig, SandboxMetadata
from virtbus.cri.core.stored_record import StoredRecord
from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.resources import ResourcesInForce

Phase = Literal["created", "starting", "running", "exited"]
"""`starting` means that a start was requested, and that its outcome is unknown."""


class Sandbox(LenientModel):
    """One attempt of a pod's sandbox. If it is not `ready`, kubelet makes the next attempt."""

    id: str
    config: SandboxConfig
    runtime_handler: str = ""
    created_ns: int
    ready: bool = True


class Ending(LenientModel):
    """The end of a container, in the terms of CRI."""

    finished_ns: int
    exit_code: int
    reason: str
    message: str = ""


class Container(LenientModel):
    """One attempt of the pod's container, which is one run of the pod's guest."""

    id: str
    sandbox_id: str
    config: ContainerConfig
    image_id: str
    created_ns: int
    phase: Phase = "created"
    started_ns: int = 0
    ending: Ending | None = None

    @property
    def name(self) -> str:
        return self.config.metadata.name

    @property
    def attempt(self) -> int:
        return self.config.metadata.attempt

    @property
    def up(self) -> bool:
        """Return True if the guest may run as this container now."""
        return self.phase in {"starting", "running"}


class ShellKey(LenientModel):
    """The key pair with which virtbus-cri logs in to a pod's guest, in OpenSSH's formats."""

    private: str = ""
    public: str = ""


class Machine(LenientModel):
    """The pod's VM. It is stored before the create of the VM, so a repeat makes no second VM."""

    uid: Uid
    name: str
    image_id: str = ""
    """The digest of the root disk's image; empty without a root disk."""
    image_name: str = ""
    """The image name in the manifest. A later attempt with the same name keeps the VM, even if a
    tag in the name means another digest by then."""
    key: ShellKey = ShellKey()
    """Empty if an earlier version of virtbus-cri made the VM."""
    made: bool = False
    """True if the VM on the bus has its disks. A VM without disks only holds the pod's network."""
    network: Literal["", "Held", "Released"] = ""
    """The state that virtbus-cri requested for the network; empty if an earlier version of
    virtbus-cri made the VM."""
    network_generation: int = 0
    """The generation of the record that requests the state `network`. A status of an earlier
    generation tells nothing about this request."""
    network_reached: bool = False
    """True if the network is in the state `network` on the node."""
    network_error: str = ""
    """The stage, reason and text of the node's failure to reach the state `network`."""
    revision: int = 0
    """The revision of the record after virtbus-cri's last change. Older views are ignored."""
    addresses: tuple[str, ...] = ()
    state: str = ""
    message: str = ""
    reason: str = ""
    stage: str = ""
    """The stage that failed, in the words of the VM's node."""
    resources: ResourcesInForce | None = None
    """The limits that the host enforces; None if the guest is off, or if the limits are unknown."""
    resources_wait: str = ""
    """The reason why the host does not enforce the record's limits yet; empty if none is known."""
    observed_generation: int = 0
    power_off: bool = False
    """True if the guest has ended, and virtbus-cri must still power off the VM's record. While the
    record is powered on, the agent could start the guest again."""


class Removal(StoredRecord):
    """A VM that no pod needs any more. It is deleted as soon as the bus answers."""

    uid: Uid


T = TypeVar("T", bound=Sandbox | Container)


class Pod(StoredRecord):
    """A pod of this node."""

    key: str
    sandboxes: tuple[Sandbox, ...] = ()
    containers: tuple[Container, ...] = ()
    machine: Machine | None = None

    @property
    def active(self) -> Container | None:
        return next((one for one in self.containers if one.up), None)

    @property
    def holds_unused(self) -> bool:
        """Return True if the pod's VM may hold a network, and no sandbox of the pod is ready."""
        held = self.machine is not None and self.machine.network != "Released"
        return held and not any(one.ready for one in self.sandboxes)

    def sandbox(self, sandbox_id: str) -> Sandbox:
        return next(one for one in self.sandboxes if one.id == sandbox_id)

    def container(self, container_id: str) -> Container:
        return next(one for one in self.containers if one.id == container_id)

    def with_sandbox(self, sandbox: Sandbox) -> "Pod":
        return self.model_copy(update={"sandboxes": _put(self.sandboxes, sandbox)})

    def with_container(self, container: Container) -> "Pod":
        return self.model_copy(update={"containers": _put(self.containers, container)})

    def with_machine(self, **fields: object) -> "Pod":
        """Return the pod with changed fields of its VM. Without a VM, return the same pod."""
        if self.machine is None:
            return self
        return self.model_copy(update={"machine": self.machine.model_copy(update=fields)})

    def without_container(self, container_id: str) -> "Pod":
        """Return the pod without this container; its VM stays."""
        kept = tuple(one for one in self.containers if one.id != container_id)
        return self.model_copy(update={"containers": kept})

    def without_sandbox(self, sandbox_id: str) -> "Pod":
        sandboxes = tuple(one for one in self.sandboxes if one.id != sandbox_id)
        containers = tuple(one for one in self.containers if one.sandbox_id != sandbox_id)
        return self.model_copy(update={"sandboxes": sandboxes, "containers": containers})


def _put(known: Iterable[T], one: T) -> tuple[T, ...]:
    return (*(other for other in known if other.id != one.id), one)


def pod_key(metadata: SandboxMetadata) -> str:
    """Return the key of a pod: 40 hex digits, which also name the pod's file."""
    whole = f"{metadata.namespace}\n{metadata.name}\n{metadata.uid}"
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:40]
