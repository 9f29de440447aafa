"""Declares the fields of a VMI that rules read."""

from dataclasses import dataclass
from datetime import datetime

from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.objects.typed import Condition, at
from virtbus.kubebridge.core.vmi.phases import Phase

GENERATION = "kubevirt.io/vm-generation"
"""The generation of the VM from which a VMI was created."""


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner of an object."""

    uid: str = at("uid")


@dataclass(frozen=True, slots=True)
class Transition:
    """The start of a phase."""

    phase: str = at("phase")


@dataclass(frozen=True, slots=True)
class Vmi:
    """A VMI. `raw` is the whole object, for the table of fields."""

    raw: Object = at()
    name: str = at("metadata", "name")
    namespace: str = at("metadata", "namespace")
    uid: str = at("metadata", "uid")
    version: str = at("metadata", "resourceVersion")
    created: datetime | None = at("metadata", "creationTimestamp")
    deleting: bool = at("metadata", "deletionTimestamp")
    finalizers: tuple[str, ...] = at("metadata", "finalizers")
    owners: tuple[Owner, ...] = at("metadata", "ownerReferences")
    labels: Object = at("metadata", "labels")
    annotations: Object = at("metadata", "annotations")
    made_of: str = at("metadata", "annotations", GENERATION)
    spec: Object = at("spec")
    grace_s: int | None = at("spec", "terminationGracePeriodSeconds")
    machine: str = at("spec", "domain", "machine", "type")
    limits: Object = at("spec", "domain", "resources", "limits")
    requests: Object = at("spec", "domain", "resources", "requests")
    status: Object = at("status")
    phase: Phase = at("status", "phase", default=Phase.PENDING)
    node: str = at("status", "nodeName")
    conditions: tuple[Condition, ...] = at("status", "conditions")
    transitions: tuple[Transition, ...] = at("status", "phaseTransitionTimestamps")
    interfaces: tuple[Object, ...] = at("status", "interfaces")
    guest_os: Object = at("status", "guestOSInfo")
