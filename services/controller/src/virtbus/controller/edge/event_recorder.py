"""Emits events of VMs and nodes on `virtbus.evt` after each change, without waiting."""

from virtbus.bus.client.ports import Bus
from virtbus.schemas import subjects
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.vm import VmRecord

_AT_BIRTH = frozenset({EventKind.VM_ACCEPTED, EventKind.VM_SCHEDULED})
"""Emitted after the commit, when the node is already at work; stamped with the commit's time."""


class EventRecorder:
    """The controller's emitter of events."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def node(self, kind: EventKind, node: str, message: str, identity: str) -> None:
        """Emit an event of a node; `identity` is the same in every controller that saw it."""
        event = Event(
            kind=kind,
            uid="",
            node=node,
            message=message,
            service="controller",
            at_ns=self._bus.sources.time_ns(),
        )
        self._bus.emit(
            subjects.node_event(node, kind), event, message_id=f"{node}:{identity}:{kind}"
        )

    def emit(self, kind: EventKind, record: VmRecord, message: str, *, revision: int = 0) -> None:
        """Emit an event; its id makes repeats of a step one event.

        `revision` distinguishes steps that change neither epoch, generation nor power epoch.
        """
        event = Event(
            kind=kind,
            uid=record.uid,
            node=record.node,
            epoch=record.epoch,
            generation=record.generation,
            namespace=record.namespace,
            name=record.name,
            message=message,
            service="controller",
            at_ns=record.created_ns if kind in _AT_BIRTH else self._bus.sources.time_ns(),
        )
        self._bus.emit(
            subjects.event(record.node, record.uid, kind),
            event,
            message_id=f"{record.uid}:{record.epoch}:{record.generation}:{record.power_epoch}:{revision}:{kind}",
        )
