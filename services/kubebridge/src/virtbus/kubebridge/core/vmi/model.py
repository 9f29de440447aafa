"""Fields of a VirtualMachineInstance (VMI) that the bridge reads."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from virtbus.kubebridge.core.objects.unstructured import Condition, Object, path

GENERATION = "kubevirt.io/vm-generation"
"""Annotation of a VMI: the generation of the VM from which the VMI was created."""


class VmiPhase(StrEnum):
    """The values of `status.phase`, as in KubeVirt."""

    PENDING = "Pending"
    SCHEDULING = "Scheduling"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


FINAL = frozenset({VmiPhase.SUCCEEDED, VmiPhase.FAILED})


@dataclass(frozen=True, slots=True)
class Owner:
    """An entry of `metadata.ownerReferences`."""

    uid: str = path("uid")


@dataclass(frozen=True, slots=True)
class Transition:
    """An entry of `status.phaseTransitionTimestamps`: a phase that the VMI has reached."""

    phase: str = path("phase")


@dataclass(frozen=True, slots=True)
class Nic:
    """An interface."""

    name: str = path("name")
    state: str = path("state")


@dataclass(frozen=True, slots=True)
class Network:
    """A network. `multus` is True for a network of Multus."""

    name: str = path("name")
    multus: bool = path("multus")


@dataclass(frozen=True, slots=True)
class Vmi:
    """A VMI. `raw` is the whole object, from which the VM on the bus is made."""

    raw: Object = path()
    name: str = path("metadata", "name")
    namespace: str = path("metadata", "namespace")
    uid: str = path("metadata", "uid")
    version: str = path("metadata", "resourceVersion")
    created: datetime | None = path("metadata", "creationTimestamp")
    deleting: bool = path("metadata", "deletionTimestamp")
    finalizers: tuple[str, ...] = path("metadata", "finalizers")
    owners: tuple[Owner, ...] = path("metadata", "ownerReferences")
    labels: Object = path("metadata", "labels")
    annotations: Object = path("metadata", "annotations")
    made_of: str = path("metadata", "annotations", GENERATION)
    spec: Object = path("spec")
    nics: tuple[Nic, ...] = path("spec", "domain", "devices", "interfaces")
    networks: tuple[Network, ...] = path("spec", "networks")
    grace_s: int | None = path("spec", "terminationGracePeriodSeconds")
    machine: str = path("spec", "domain", "machine", "type")
    limits: Object = path("spec", "domain", "resources", "limits")
    requests: Object = path("spec", "domain", "resources", "requests")
    status: Object = path("status")
    phase: VmiPhase = path("status", "phase", default=VmiPhase.PENDING)
    node: str = path("status", "nodeName")
    conditions: tuple[Condition, ...] = path("status", "conditions")
    transitions: tuple[Transition, ...] = path("status", "phaseTransitionTimestamps")
    interfaces: tuple[Object, ...] = path("status", "interfaces")
    guest_os: Object = path("status", "guestOSInfo")
