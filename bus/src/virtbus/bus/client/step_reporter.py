"""Publishes the ready events and events of one service's step in a create."""

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
    """The step's name in the subject of its ready event, and its events."""

    step: str
    made: EventKind
    failed: EventKind
    released: EventKind


class StepReporter(EventRecorder):
    """Publishes on the bus; nothing here decides, or can fail the work."""

    def __init__(self, bus: Bus, service: str, node: str, names: StepEvents) -> None:
        super().__init__(bus, service, node)
        self._names = names

    async def ready(self, ready: ImageReady | NetReady) -> None:
        """Publish the ready event of a create; it may be lost."""
        await self._bus.publish(subjects.ready(self._node, ready.uid, self._names.step), ready)

    def made(self, record: VmRecord, took_ms: float, detail: Mapping[str, str]) -> None:
        """Emit that the step has made something."""
        self.emit(self.about(self._names.made, record, took_ms=took_ms, detail=detail))

    def failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> None:
        """Emit a failure; one event for each reason of a generation, not for each attempt."""
        detail = {"attempt": str(attempt)}
        why = {"reason": error.reason, "message": str(error), "detail": detail}
        self.emit(self.about(self._names.failed, record, **why))

    def released(self, uid: str, epoch: int) -> None:
        """Emit that everything of a VM was removed."""
        self.emit(self.event(self._names.released, uid=uid, epoch=epoch))
