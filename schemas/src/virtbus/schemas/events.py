"""Events of VMs, nodes (uid `_`), objects and operations: `virtbus.evt.<node>.<uid>.<kind>`."""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.model import LenientModel


class EventKind(StrEnum):
    """The kinds of events of VMs, of nodes, and of named objects and operations."""

    VM_ACCEPTED = "vm.accepted"
    VM_SCHEDULED = "vm.scheduled"
    VM_UPDATED = "vm.updated"
    VM_EVACUATING = "vm.evacuating"
    VM_MOVED = "vm.moved"
    VM_DELETING = "vm.deleting"
    VM_DELETED = "vm.deleted"
    VM_FAILED = "vm.failed"
    IMAGE_PULLING = "image.pulling"
    IMAGE_READY = "image.ready"
    IMAGE_FAILED = "image.failed"
    NETWORK_READY = "network.ready"
    NETWORK_FAILED = "network.failed"
    NETWORK_RELEASED = "network.released"
    DISKS_RELEASED = "disks.released"
    DOMAIN_DEFINED = "domain.defined"
    DOMAIN_STARTED = "domain.started"
    GUEST_READY = "guest.ready"
    DOMAIN_PAUSED = "domain.paused"
    DOMAIN_RESUMED = "domain.resumed"
    NIC_PLUGGED = "nic.plugged"
    NIC_UNPLUGGED = "nic.unplugged"
    GUEST_RESET = "guest.reset"
    GUEST_REBOOTING = "guest.rebooting"
    GUEST_REBOOTED = "guest.rebooted"
    GUEST_FROZEN = "guest.frozen"
    GUEST_THAWED = "guest.thawed"
    GUEST_PANICKED = "guest.panicked"
    GUEST_WATCHDOG = "guest.watchdog"
    DOMAIN_STOPPING = "domain.stopping"
    DOMAIN_STOPPED = "domain.stopped"
    DOMAIN_FAILED = "domain.failed"
    NODE_READY = "node.ready"
    NODE_SUSPECT = "node.suspect"
    NODE_DOWN = "node.down"
    NODE_LEFT = "node.left"
    NODE_FENCED = "node.fenced"
    NODE_UNFENCED = "node.unfenced"
    NODE_FORGOTTEN = "node.forgotten"
    NODE_TRIMMED = "node.trimmed"
    """Some of the node's stored events or statuses were removed to make space for other nodes."""
    NODE_RIVAL = "node.rival"
    NODE_TAKEN_OVER = "node.taken-over"
    NODE_APPROVED = "node.approved"
    VOLUME_CREATED = "volume.created"
    VOLUME_UPDATED = "volume.updated"
    VOLUME_DELETING = "volume.deleting"
    VOLUME_DELETED = "volume.deleted"
    SNAPSHOT_CREATED = "snapshot.created"
    SNAPSHOT_READY = "snapshot.ready"
    SNAPSHOT_UPDATED = "snapshot.updated"
    SNAPSHOT_DELETING = "snapshot.deleting"
    SNAPSHOT_DELETED = "snapshot.deleted"
    IMAGE_NAME_SET = "imagename.set"
    IMAGE_NAME_DELETED = "imagename.deleted"
    BACKUP_SCHEDULE_CREATED = "backup-schedule.created"
    BACKUP_SCHEDULE_UPDATED = "backup-schedule.updated"
    BACKUP_SCHEDULE_FAILED = "backup-schedule.failed"
    """A run made no backup, or a damaged backup."""
    BACKUP_SCHEDULE_DELETED = "backup-schedule.deleted"
    NETWORK_CREATED = "network.created"
    NETWORK_UPDATED = "network.updated"
    NETWORK_DELETING = "network.deleting"
    NETWORK_KEPT = "network.kept"
    """A delete was reverted, because a VM uses the network."""
    NETWORK_DELETED = "network.deleted"
    GROUP_CREATED = "security-group.created"
    GROUP_UPDATED = "security-group.updated"
    GROUP_DELETED = "security-group.deleted"
    OPERATION_ACCEPTED = "operation.accepted"
    OPERATION_SUCCEEDED = "operation.succeeded"
    OPERATION_FAILED = "operation.failed"
    OPERATION_CANCELLED = "operation.cancelled"
    SPAN = "trace.span"


class Event(LenientModel):
    """One event. `at_ns` is the sender's time, for people; the stream sequence gives the order."""

    kind: EventKind
    uid: str
    node: str
    epoch: int = 0
    generation: int = 0
    namespace: str = ""
    name: str = ""
    reason: str = ""
    message: str = ""
    service: str = ""
    at_ns: int = 0
    took_ms: float | None = None
    detail: dict[str, str] = Field(default_factory=dict)


class Span(LenientModel):
    """A finished span (OpenTelemetry), stored as an event so that `vm trace` needs no collector."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    service: str
    node: str = ""
    start_ns: int
    end_ns: int
    ok: bool = True
    message: str = ""
    attributes: dict[str, str] = Field(default_factory=dict)


class SpanBatch(LenientModel):
    """The stored form of spans: the spans of one VM and one service that ended together."""

    spans: tuple[Span, ...] = ()


class DeadLetter(LenientModel):
    """`virtbus.dlq.<service>`: a message that could not be handled, without its content.

    The content may be secret, so it is left out. The stream may still have the message at
    `revision` of `subject`.
    """

    subject: str
    revision: int
    reason: str
    message: str
    size_bytes: int
    service: str
    at_ns: int
