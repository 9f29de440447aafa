"""Publishes ready messages and events for a service's step in a VM's creation."""

from collections.abc import Mapping
from typing import NamedTuple

from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.vm import VmRecord


class StepEvents(NamedTuple):
    """The step's name in the subject of its ready message, and the kinds of its events."""

    step: str
    made: EventKind
    failed: EventKind
    released: EventKind


class StepReporter(EventRecorder):
    """Publishes a step's outcomes. No method raises an error of the bus."""

    def __init__(self, bus: Bus, service: str, node: str, names: StepEvents) -> None:
        super().__init__(bus, service, node)
        self._names = names

    async def ready(self, ready: ImageReady | NetReady) -> None:
        """Publish the step's outcome. The message may be lost."""
        await self._bus.publish(subjects.ready(self._node, ready.uid, self._names.step), ready)

    def made(self, record: VmRecord, took_ms: float, detail: Mapping[str, str]) -> None:
        self.emit(self.about(self._names.made, record, took_ms=took_ms, detail=detail))

    def failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> None:
        """Emit a failure once in ten minutes for each epoch, generation and reason."""
        detail = {"attempt": str(attempt)}
        why = {"reason": error.reason, "message": str(error), "detail": detail}
        self.emit(self.about(self._names.failed, record, **why))

    def released(self, uid: str, epoch: int) -> None:
        self.emit(self.event(self._names.released, uid=uid, epoch=epoch))
