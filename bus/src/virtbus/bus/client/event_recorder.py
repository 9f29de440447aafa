"""Makes the events of one service and emits them in the background."""

from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.schemas import subjects
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.vm import VmRecord


class EventRecorder:
    """Emits events without waiting until they are stored, and without raising errors."""

    def __init__(self, bus: Bus, service: str, node: str = "") -> None:
        self._bus = bus
        self.service = service
        self._node = node

    def event(self, kind: EventKind, **fields: Any) -> Event:
        """Return an event. `fields` override its service, node and time."""
        own = {"service": self.service, "node": self._node, "at_ns": self._bus.sources.time_ns()}
        return Event(kind=kind, **(own | fields))

    def about(self, kind: EventKind, record: VmRecord, **fields: Any) -> Event:
        """Return an event about a VM. A service without a node takes the node of `record`."""
        return self.event(
            kind,
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            namespace=record.namespace,
            name=record.name,
            **({"node": self._node or record.node} | fields),
        )

    def emit(self, event: Event, message_id: str = "") -> None:
        """Emit an event. Ignore it if a recent event has the same subject and message id.

        The default of `message_id` consists of uid, epoch, generation, kind and reason.
        """
        own = f"{event.uid}:{event.epoch}:{event.generation}:{event.kind}:{event.reason}"
        subject = subjects.event(event.node, event.uid, event.kind)
        self._bus.emit(subject, event, message_id=message_id or own)
