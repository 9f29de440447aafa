"""Lists the kinds of objects that the bridge reads or writes, and names single objects."""

from typing import NamedTuple


class Kind(NamedTuple):
    """A resource of one API version. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Return the apiVersion of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, name: str = "", namespace: str = "", sub: str = "") -> str:
        """Return the URL path of one object, or without `name` of all objects.

        Without `namespace`, the path covers all namespaces.
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
        """Return `namespace/name`, by which stores keep objects."""
        return f"{self.namespace}/{self.name}"

    def of(self, kind: Kind) -> "Key":
        """Return the key of the object of another kind with the same name."""
        return Key(kind, self.namespace, self.name)


def key_of(kind: Kind, path: str) -> Key:
    """Return the key of a `namespace/name`."""
    namespace, _, name = path.partition("/")
    return Key(kind, namespace, name)


VM = Kind("kubevirt.io", "v1", "virtualmachines", "VirtualMachine")
VMI = Kind("kubevirt.io", "v1", "virtualmachineinstances", "VirtualMachineInstance")
KUBEVIRT = Kind("kubevirt.io", "v1", "kubevirts", "KubeVirt")

NAMESPACE = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
SECRET = Kind("", "v1", "secrets", "Secret")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
SERVICE = Kind("", "v1", "services", "Service")
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
GUEST_AGENT = Kind("virtbus", "v1", "guestagents", "GuestAgent")
ORPHAN = Kind("virtbus", "v1", "orphans", "Orphan")
"""Sources on the bus: VMs, nodes, answers of guest agents, and VMs that have no VMI."""
