"""A node: its liveness record, written by its nodeagent, and how the API shows it."""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.image import ImageKeys
from virtbus.schemas.model import Fact


class NodeState(StrEnum):
    """A node as users see it; what its services say of themselves is one of the first four."""

    RECOVERING = "recovering"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"
    """Its agent was stopped, and said so."""
    SUSPECT = "suspect"
    """Not heard for 10 s: takes no VM, and what it said of its VMs is shown as Unknown."""
    DOWN = "down"
    """Not heard for 25 s while the bus and most other nodes were there."""


class ServiceState(Fact):
    """One service of a node, as it reports itself."""

    state: NodeState = NodeState.RECOVERING
    version: str = ""
    message: str = ""
    seen_ns: int = 0


class NodeRecord(Fact):
    """`$KV.node.<id>`: liveness and capacity. In memory, TTL 15 s, renewed every 4 s."""

    schema_version: int = 1
    node: str
    hostname: str
    instance: str
    state: NodeState
    cpus: int
    memory_bytes: int
    disk_free_bytes: int = 0
    disk_reserve_bytes: int = 0
    """What new VMs leave free of the disk; 0: the disk is not looked at (simulated nodes)."""
    max_vcpus: int = 0
    accelerators: tuple[str, ...] = ("tcg",)
    labels: dict[str, str] = Field(default_factory=dict)
    networks: tuple[str, ...] = ("default",)
    network_namespaces: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Who may use a network beside `default`: namespaces, or `*` for all. None: nobody."""
    addresses: tuple[str, ...] = ()
    """The host's own IPv4 and IPv6 addresses of global scope, but those of guests' bridges."""
    services: dict[str, ServiceState] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    started_ns: int = 0
    time_ns: int = 0
    held: int = 0
    """VMs here that the bus has no record of: nothing starts or ends them but a person."""
    quarantined: int = 0
    """Entries of the node's quarantine, and the bytes of the disk that they take."""
    quarantined_bytes: int = 0


class NodeImages(Fact):
    """`$KV.st.<node>._images`: which images a node has, for placement. Written when it changes.

    A key is of a reference or of a digest (`image_key`), so that however many there are and
    however long, it stays below 16 KiB.
    """

    schema_version: int = 1
    node: str
    keys: ImageKeys = ()


class Fence(Fact):
    """Proof that a node is off, and which of its lives that ended.

    `instance` is the agent's as last heard, empty where no controller that was there heard it.
    """

    instance: str = ""
    started_ns: int = 0
    by: str
    """`operator`, or `agent` for the configured fence command."""
    why: str
    time_ns: int
    discard_local_disks: bool = False
    """The user's word for all VMs of the node; else each VM's eviction strategy says."""


class Drain(Fact):
    """The wish that a node's VMs leave; `discard_local_disks` is the user's word for them all."""

    discard_local_disks: bool = False
    since_ns: int


class NodeWish(Fact):
    """`$KV.vm.<node>._wish`: what is wanted of a node. Written by controllers, by CAS.

    It lies in the node's own subtree, so that a node reads in one list what it shall run and
    whether it is fenced: a fenced node starts nothing (F25). No key: the node takes VMs.
    One that wants nothing expires: it is there for its `requests` only.
    """

    schema_version: int = 1
    node: str
    cordoned: bool = False
    draining: Drain | None = None
    fenced: Fence | None = None
    lease_revision: int = 0
    """The revision of the lease under which a singleton wrote it; 0 for a person's word."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests about the node: one that comes again changes nothing."""

    @property
    def idle(self) -> bool:
        """True where nothing is wanted."""
        return not (self.cordoned or self.draining or self.fenced)

    @property
    def closed(self) -> str:
        """Why the node takes no VM, as in "n1 is cordoned"; empty where it does."""
        if self.fenced is not None:
            return f"is fenced ({self.fenced.why})"
        if self.draining is not None:
            return "is being drained"
        return "is cordoned" if self.cordoned else ""


class HostAddresses(Fact):
    """`$KV.vm.<node>._hosts`: addresses that guests of the node may not reach.

    Written by controllers, by CAS. `own` are the node's, kept while it is silent; `fleet` are
    those of every host, the node's own among them.
    """

    schema_version: int = 1
    node: str
    own: tuple[str, ...] = ()
    fleet: tuple[str, ...] = ()


class Reserved(Fact):
    """`$KV.vm._reserved.node.<node>`: the sum of what strict VMs have on a node.

    Written in one atomic batch with their records only; memory with QEMU's overhead.
    """

    schema_version: int = 1
    node: str
    vms: int = 0
    vcpus: int = 0
    memory_bytes: int = 0


class NodeView(NodeRecord):
    """A node as the API shows it."""

    wish: NodeWish | None = None
    images: int = 0
    """How many images it has, by each name and by digest; 512 at the most are told of."""
    vms: int = 0
    committed_vcpus: int = 0
    committed_memory_bytes: int = 0
    age_s: float = 0.0
    skew_s: float = 0.0
    cut: tuple[str, ...] = ()
    """Fields left out, because the view was too large to be sent."""
