"""Types for controllers: kinds and keys of objects, actions, and watched changes.

The actions of a reconcile run in order, and each is safe to repeat. A write at the version that was
read may conflict. A conflict or a refusal ends the actions, and the object is reconciled again.
Two refusals do not end the actions: an ignored one (`OnRefusal.IGNORE`), and one whose reason was
already reported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, Literal, NamedTuple, Protocol

from virtbus.schemas.api import VmCreated
from virtbus.schemas.errors import Code
from virtbus.schemas.model import StrictModel
from virtbus.schemas.security_group_api import (
    SecurityGroupCreate,
    SecurityGroupDelete,
    SecurityGroupUpdate,
)
from virtbus.schemas.vm_status import VmView


class Kind(NamedTuple):
    """A resource of one API version. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, name: str = "", namespace: str = "", sub: str = "") -> str:
        """Return the URL path of one object, or of all objects if `name` is empty.

        If `namespace` is empty, the path covers all namespaces.
        """
        parts = ["apis", self.group] if self.group else ["api"]
        parts.append(self.version)
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [one for one in (self.plural, name, sub) if one]
        return "/" + "/".join(parts)


class Key(NamedTuple):
    """The name of one object. `namespace` is empty for a cluster-wide kind."""

    kind: Kind
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.name}"

    def of(self, kind: Kind) -> "Key":
        return Key(kind, self.namespace, self.name)


def key_of(kind: Kind, path: str) -> Key:
    """Return the key for the path `namespace/name`."""
    namespace, _, name = path.partition("/")
    return Key(kind, namespace, name)


VM = Kind("kubevirt.io", "v1", "virtualmachines", "VirtualMachine")
VMI = Kind("kubevirt.io", "v1", "virtualmachineinstances", "VirtualMachineInstance")
KUBEVIRT = Kind("kubevirt.io", "v1", "kubevirts", "KubeVirt")

NAMESPACE = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
SECRET = Kind("", "v1", "secrets", "Secret")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
ATTACHMENT = Kind(
    "k8s.cni.cncf.io", "v1", "network-attachment-definitions", "NetworkAttachmentDefinition"
)
SERVICE = Kind("", "v1", "services", "Service")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
EVENT = Kind("events.k8s.io", "v1", "events", "Event")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")

ACCESS_REVIEW = Kind(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
API_SERVICE = Kind("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False)
MUTATING = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    namespaced=False,
)
VALIDATING = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
)

BUS_VM = Kind("virtbus", "v1", "vms", "BusVm")
BUS_NODE = Kind("virtbus", "v1", "nodes", "BusNode", namespaced=False)
BUS_GROUP = Kind("virtbus", "v1", "groups", "BusGroup")
GUEST_AGENT = Kind("virtbus", "v1", "guestagents", "GuestAgent")
ORPHAN = Kind("virtbus", "v1", "orphans", "Orphan")
"""Kinds that exist only in the bridge: VMs, nodes and groups of the bus, answers of guest agents,
and VMs without a VMI."""

AT_ONCE_S = 0.01
"""Seconds before the next reconcile, if that reconcile needs the result of the present one."""


class Refused(NamedTuple):
    """The last refusal of a create or call. It is an input of the next reconcile."""

    code: int
    reason: str
    message: str


class OnRefusal(Enum):
    """The effect of a refusal by the bus."""

    RETRY = auto()
    REPORT = auto()
    """The refusal becomes an input of the next reconcile."""
    IGNORE = auto()


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object. If the name exists already, that is a success. A refusal is reported."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace an object, only if it still has the version in `body`."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """Change the reconciled object, only if it still has the version that was read.

    `status` is replaced as a whole. In `metadata` and `spec`, a map such as the labels gets new
    entries, and any other field is replaced.
    """

    changes: dict[str, Any]
    sub: str = ""


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `changes` into an object of any version. Only the bridge writes these fields."""

    key: Key
    changes: dict[str, Any]
    absent_s: float = 0.0
    """Seconds before the next reconcile if the object does not exist."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid. A missing object is a success.

    If `version` is given and is not the current version, the delete is a conflict.
    """

    key: Key
    uid: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class BusCall:
    """Send a verb of the bus' API about a VM, such as `create`.

    A refusal with the code `gone` proves that the VM does not exist.
    """

    verb: str
    request: StrictModel
    gone: Code | None = None
    refusal: OnRefusal = OnRefusal.RETRY
    answer: type[VmCreated | VmView] = VmView


@dataclass(frozen=True, slots=True)
class GroupCall:
    """Send a verb of the bus' API about a security group. A refusal is reported."""

    verb: Literal["create", "update", "delete"]
    request: SecurityGroupCreate | SecurityGroupUpdate | SecurityGroupDelete


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record an Event on the object `on`, by default on the reconciled object.

    A missing object gets no Event. If `code` is set, the message is also logged as a warning with
    this code.
    """

    reason: str
    message: str
    warning: bool = False
    on: Key | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile again after `after_s` seconds, even if nothing changes."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Await:
    """Reconcile once more when one of these objects changes. Any reconcile ends the wait."""

    references: frozenset[Key]


Action = (
    Create | Replace | Patch | Merge | Delete | BusCall | GroupCall | RecordEvent | Requeue | Await
)


Notify = Callable[[str], None]
"""Takes the `namespace/name` of an object that changed."""


class Lister(Protocol):
    """Read access to a store of one kind. Paths are `namespace/name`."""

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a new copy of the object; None if it does not exist."""

    def uid(self, name: str) -> str:
        """Return the uid of the object; empty if it does not exist."""

    def ended(self, uid: str) -> bool:
        """Return True if the object with this uid was reported as deleted."""

    def __iter__(self) -> Iterator[str]:
        """Yield all paths."""


class Inputs(NamedTuple):
    """The inputs of a reconcile. `obj` is None if the object does not exist.

    `time_s` is a clock that never jumps. `references` has the existing objects among those that
    `Controller.references` named.
    """

    obj: dict[str, Any] | None
    now: datetime
    time_s: float
    references: Mapping[Key, dict[str, Any]]
    refused: Refused | None = None


class KeyMapping(NamedTuple):
    """A kind whose changes cause reconciles. `keys` maps a changed key to the keys to reconcile.

    The runtime replaces the kind of the returned keys by the controller's kind. By default, a
    change reconciles the object of the same name.
    """

    source: Kind
    keys: Callable[[Key], Iterable[Key]] = lambda key: (key,)


@dataclass(frozen=True)
class Controller:
    """A controller of one kind.

    Before `reconcile`, the runtime reads the objects of `references` from the API server, uncached.
    """

    kind: Kind
    reconcile: Callable[[Key, Inputs], Sequence[Action]]
    watches: tuple[KeyMapping, ...]
    references: Callable[[Key, float], Iterable[Key]] = lambda _key, _time_s: ()
    workers: int = 16
    gather_s: float = 0.0
    """Seconds for which changes are collected before a reconcile."""
