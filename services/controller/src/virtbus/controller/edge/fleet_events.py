"""Emits the controller's events on `virtbus.evt` after each change, without waiting."""

from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus
from virtbus.controller.core.vm_keys import NamedRecord
from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord

_AT_BIRTH = frozenset({EventKind.VM_ACCEPTED, EventKind.VM_SCHEDULED})
"""Events of a create. They are emitted after the commit, when the node may already act. Therefore
they carry the record's creation time, and sort before the node's events."""


class FleetEvents:
    """The controller's events of VMs, nodes and named objects."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._events = EventRecorder(bus, "controller")

    def node(self, kind: EventKind, node: str, message: str, identity: str) -> None:
        """Emit an event of a node.

        If several controllers emit the same event, they pass the same `identity`: the stream keeps
        one copy.
        """
        event = self._events.event(kind, uid="", node=node, message=message)
        self._bus.emit(
            subjects.node_event(node, kind), event, message_id=f"{node}:{identity}:{kind}"
        )

    def named(self, kind: EventKind, record: NamedRecord, revision: int, message: str) -> None:
        """Emit an event of a named object; `revision` is that of the object's change or purge."""
        event = self._events.event(
            kind,
            uid=record.uid,
            node=(record.node if isinstance(record, VolumeRecord | SnapshotRecord) else "")
            or UNPLACED,
            generation=record.generation,
            namespace=record.namespace,
            name=record.name,
            message=message,
        )
        self._events.emit(event, f"{record.uid}:{revision}:{kind}")

    def operation(self, record: OperationRecord, revision: int) -> None:
        """Emit that an operation was accepted. Its node emits the event of the operation's end."""
        event = self._events.event(
            EventKind.OPERATION_ACCEPTED,
            uid=record.uid,
            node=record.node,
            epoch=record.epoch,
            namespace=record.namespace,
            name=record.name,
            detail={"operation": record.id, "kind": record.kind},
        )
        self._events.emit(event, f"{record.id}:{revision}")

    def emit(self, kind: EventKind, record: VmRecord, message: str, *, revision: int = 0) -> None:
        """Emit an event of a VM. A repeated step has the same message id, and is stored once.

        Steps that keep epoch, generation and power epoch need a `revision` to be distinct.
        """
        at = {"at_ns": record.created_ns} if kind in _AT_BIRTH else {}
        step = f"{record.epoch}:{record.generation}:{record.power_epoch}:{revision}"
        event = self._events.about(kind, record, message=message, **at)
        self._events.emit(event, f"{record.uid}:{step}:{kind}")
