"""A node: its liveness record, written by its nodeagent, and its view in the API."""

from enum import StrEnum
from operator import not_

from pydantic import Field

from virtbus.schemas.hosts import Approved, HostMarks, Instance
from virtbus.schemas.image import ImageKeys
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.overlay import TunnelEnd
from virtbus.schemas.pool import PoolReport


class NodeState(StrEnum):
    """The state of a node. The node's own services report one of the first four states."""

    RECOVERING = "recovering"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"
    """The agent was stopped and reported that."""
    SUSPECT = "suspect"
    """Silent for 10 s: it gets no VM, and the states of its VMs are shown as Unknown."""
    DOWN = "down"
    """Silent for 25 s while the bus and most other nodes were reachable."""


class ServiceState(LenientModel):
    """One service of a node, as it reports itself."""

    state: NodeState = NodeState.RECOVERING
    version: str = ""
    message: str = ""
    seen_ns: int = 0


class NodeRecord(LenientModel):
    """`$KV.node.<id>`: liveness and capacity. The agent renews it every 4 s; its TTL is 15 s."""

    schema_version: int = SCHEMA_VERSION
    node: str
    hostname: str
    instance: str
    state: NodeState
    cpus: int
    memory_bytes: int
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    disk_reserve_bytes: int = 0
    """Disk space that new VMs must leave free. 0: disk space is not checked (simulated nodes)."""
    max_vcpus: int = 0
    kubernetes_cpus: float = 0
    """CPUs that kubelet gives to the pods of this node, VM pods included. 0: kubelet gives none."""
    kubernetes_memory_bytes: int = 0
    accelerators: tuple[str, ...] = ("tcg",)
    labels: dict[str, str] = Field(default_factory=dict)
    networks: tuple[str, ...] = ("default",)
    network_namespaces: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The namespaces that may use each network other than `default`; `*` means all namespaces. A
    network without an entry may not be used."""
    guest_subnet: str = ""
    """The subnet of the network `default`."""
    guest_subnet6: str = ""
    cni_plugins: tuple[str, ...] = ()
    """CNI plugins that the conflist in a network object may run."""
    links: dict[str, str] = Field(default_factory=dict)
    """Links of the host that networks may name, each with the kind of network that it carries."""
    link_mtus: dict[str, int] = Field(default_factory=dict, exclude_if=not_)
    """The MTUs of the host's links in `links`."""
    tunnel: TunnelEnd | None = None
    """The host's end of the tunnels of overlays; None: the node takes no VMs of overlays."""
    bindings: tuple[str, ...] = ()
    """Bindings that need a program, if the node has the program: `passt`."""
    directories: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Directories of the host that VM pods may mount. Directories below these are included.

    Each value lists the namespaces whose VMs without a pod may mount the directory; `*` means all.
    """
    addresses: tuple[str, ...] = ()
    """The host's own global IPv4 and IPv6 addresses, without addresses of guests' Linux bridges."""
    services: dict[str, ServiceState] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    started_ns: int = 0
    time_ns: int = 0
    held: int = 0
    """Number of VMs on the node without a record on the bus. Only a person starts or ends them."""
    quarantined: int = 0
    """Number of entries in the node's quarantine; `quarantined_bytes` is their disk space."""
    quarantined_bytes: int = 0
    image_bytes: int = 0
    """Disk space of images and partial downloads. `image_quota_bytes` is its quota; 0: no quota."""
    image_quota_bytes: int = 0
    host: HostMarks | None = None


class NodeImages(LenientModel):
    """`$KV.st.<node>._images`: the images that a node has, for placement. Written on change.

    Each entry is the key of a reference or digest (`image_key`), so the value stays below 16 KiB.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    keys: ImageKeys = ()


class Fence(LenientModel):
    """Proof that a node is off.

    `instance` and `started_ns` are those of the agent's last heartbeat. `instance` is empty if the
    controller that wrote the fence had received no heartbeat.
    """

    instance: str = ""
    started_ns: int = 0
    by: str
    """`operator`, or `agent` for the configured fence command."""
    why: str
    time_ns: int
    discard_local_disks: bool = False
    """The user's permission to lose local disks. A VM's eviction strategy overrides this."""


class Drain(LenientModel):
    """A request to evacuate a node; `discard_local_disks` is as in `Fence`."""

    discard_local_disks: bool = False
    since_ns: int


class NodeSpec(LenientModel):
    """`$KV.vm.<node>._spec`: the desired state of a node. Controllers write it by CAS.

    The key is in the node's own subtree. So one list gives a node both its VMs and its fence: a
    fenced node starts nothing (F25). Without the key, the node takes VMs. A value that requests
    nothing is kept only for its `requests`, and expires.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    cordoned: bool = False
    draining: Drain | None = None
    fenced: Fence | None = None
    lease_revision: int = 0
    """The revision of the lease under which a leader task wrote this value; 0 for a person's
    request."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests about the node. A repeated request changes nothing."""

    @property
    def idle(self) -> bool:
        return not (self.cordoned or self.draining or self.fenced)

    @property
    def closed(self) -> str:
        """Return why the node takes no VMs, such as "is cordoned"; empty if it takes VMs."""
        if self.fenced is not None:
            return f"is fenced ({self.fenced.why})"
        if self.draining is not None:
            return "is being drained"
        return "is cordoned" if self.cordoned else ""


class HostAddresses(LenientModel):
    """`$KV.vm.<node>._hosts`: addresses that guests of the node may not reach.

    Controllers write it by CAS. `own` are the addresses of the node's host, kept while the node is
    silent. `fleet` are the addresses of all hosts, including the node's own host.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    own: tuple[str, ...] = ()
    fleet: tuple[str, ...] = ()


class Reserved(LenientModel):
    """`$KV.vm._reserved.node.<node>`: the summed resources of VMs with `Overcommit.STRICT`.

    The value is written only in one atomic batch with the VMs' records. Memory includes QEMU's
    overhead.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    vms: int = 0
    vcpus: int = 0
    memory_bytes: int = 0


class NodeView(NodeRecord):
    """A node as the API shows it."""

    node_spec: NodeSpec | None = None
    images: int = 0
    """Number of the node's image keys: one for each name and each digest, at most 512."""
    pools: tuple[PoolReport, ...] = ()
    vms: int = 0
    committed_vcpus: int = 0
    committed_memory_bytes: int = 0
    age_s: float = 0.0
    skew_s: float = 0.0
    cut: tuple[str, ...] = ()
    """Fields that were omitted because the view was too large for one message."""
    approved: Approved | None = None
    unapproved: tuple[str, ...] = ()
    """Reported capacity and labels beyond the approved values. Placement ignores these."""
    rivals: tuple[Instance, ...] = ()
    """Agents of the same id that were refused recently."""
