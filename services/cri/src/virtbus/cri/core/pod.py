"""Defines a pod, as virtbus-cri stores it: its sandboxes, its containers, and its VM.

A pod is stored in one file. So each change of a pod is atomic: after a kill at any time, the file
has the pod from before the change, or from after the change.
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
"""`starting`: a start was requested, and its outcome is not known yet."""


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
    """One attempt of the pod's container: one run of the pod's guest."""

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
        """Return True if the guest may be running for this container now."""
        return self.phase in {"starting", "running"}


class ShellKey(LenientModel):
    """The key pair with which virtbus-cri logs in to a pod's guest, in OpenSSH's formats."""

    private: str = ""
    public: str = ""


class Machine(LenientModel):
    """The pod's VM. It is stored before the VM is created, so a repeat creates no second one."""

    uid: Uid
    name: str
    image_id: str = ""
    """The digest of the image that the root disk was made from; empty if there is no such disk."""
    image_name: str = ""
    """The image name in the manifest. A later attempt with the same name keeps the VM, even if the
    digest behind a tag has changed."""
    key: ShellKey = ShellKey()
    """Empty if an earlier version of virtbus-cri made the VM."""
    made: bool = False
    """True if the VM on the bus has its disks. Before that, it only holds the pod's network."""
    network: Literal["", "Held", "Released"] = ""
    """The network's state that virtbus-cri requested; empty if an earlier version made the VM."""
    network_generation: int = 0
    """The record's generation that requests the state `network`. Statuses of earlier generations
    do not show if the network has this state."""
    network_reached: bool = False
    """True if the node has brought the network to the state `network`."""
    network_error: str = ""
    """The stage, reason and text of the node's failure to reach the state `network`."""
    revision: int = 0
    """The record's revision after virtbus-cri's last change. Views of earlier revisions are
    ignored."""
    addresses: tuple[str, ...] = ()
    state: str = ""
    message: str = ""
    reason: str = ""
    stage: str = ""
    """The stage that failed, as the VM's node names it."""
    resources: ResourcesInForce | None = None
    """The limits that the host enforces; None if the guest is off, or if they are not known."""
    resources_wait: str = ""
    """The reason why the host does not enforce the record's limits yet; empty if it does."""
    observed_generation: int = 0
    power_off: bool = False
    """True if the guest has ended, and the VM's record must still be powered off, so that nothing
    starts the guest again."""


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
        """Return the container whose guest may run, or None."""
        return next((one for one in self.containers if one.up), None)

    @property
    def holds_unused(self) -> bool:
        """Return True if the pod's VM holds a network that no sandbox needs."""
        held = self.machine is not None and self.machine.network != "Released"
        return held and not any(one.ready for one in self.sandboxes)

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Return the sandbox with this id."""
        return next(one for one in self.sandboxes if one.id == sandbox_id)

    def container(self, container_id: str) -> Container:
        """Return the container with this id."""
        return next(one for one in self.containers if one.id == container_id)

    def with_sandbox(self, sandbox: Sandbox) -> "Pod":
        """Return the pod with this sandbox added or replaced."""
        return self.model_copy(update={"sandboxes": _put(self.sandboxes, sandbox)})

    def with_container(self, container: Container) -> "Pod":
        """Return the pod with this container added or replaced."""
        return self.model_copy(update={"containers": _put(self.containers, container)})

    def with_machine(self, **fields: object) -> "Pod":
        """Return the pod with these fields of its VM changed."""
        if self.machine is None:
            return self
        return self.model_copy(update={"machine": self.machine.model_copy(update=fields)})

    def without_container(self, container_id: str) -> "Pod":
        """Return the pod without this container; its VM stays."""
        kept = tuple(one for one in self.containers if one.id != container_id)
        return self.model_copy(update={"containers": kept})

    def without_sandbox(self, sandbox_id: str) -> "Pod":
        """Return the pod without this sandbox and its containers."""
        sandboxes = tuple(one for one in self.sandboxes if one.id != sandbox_id)
        containers = tuple(one for one in self.containers if one.sandbox_id != sandbox_id)
        return self.model_copy(update={"sandboxes": sandboxes, "containers": containers})


def _put(known: Iterable[T], one: T) -> tuple[T, ...]:
    return (*(other for other in known if other.id != one.id), one)


def pod_key(metadata: SandboxMetadata) -> str:
    """Return the name of a pod's file: 40 hex digits, a function of namespace, name and uid."""
    whole = f"{metadata.namespace}\n{metadata.name}\n{metadata.uid}"
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:40]
