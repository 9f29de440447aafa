"""A node: its liveness record, written by its nodeagent, and how the API shows it."""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.model import Fact


class NodeState(StrEnum):
    """What a node's services say of themselves."""

    RECOVERING = "recovering"
    READY = "ready"
    DRAINING = "draining"


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
    max_vcpus: int = 0
    accelerators: tuple[str, ...] = ("tcg",)
    labels: dict[str, str] = Field(default_factory=dict)
    networks: tuple[str, ...] = ("default",)
    image_names: tuple[str, ...] = ()
    image_digests: tuple[str, ...] = ()
    services: dict[str, ServiceState] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    started_ns: int = 0
    time_ns: int = 0


class NodeView(NodeRecord):
    """A node as the API shows it."""

    vms: int = 0
    committed_vcpus: int = 0
    committed_memory_bytes: int = 0
    age_s: float = 0.0
    skew_s: float = 0.0
