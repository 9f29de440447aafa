"""Publishes imaged's ready events, events and progress."""

from typing import Any

from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus
from virtbus.imaged.single_flight import Listener
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.image import Progress
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.vm import VmRecord

STEP = "image"


class DiskReporter:
    """Publishes on the bus; nothing here decides, or can fail the work."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._events = EventRecorder(bus, "imaged", node)

    async def ready(self, ready: ImageReady) -> None:
        """Publish the ready event of a create; it may be lost."""
        await self._bus.publish(subjects.ready(self._node, ready.uid, STEP), ready)

    def made(self, record: VmRecord, ready: ImageReady, took_ms: float) -> None:
        """Emit that disks were made."""
        self._emit(EventKind.IMAGE_READY, record, took_ms=took_ms, detail={"digest": ready.digest})

    def failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> None:
        """Emit a failure; one event for each reason of a generation, not for each attempt."""
        self._emit(
            EventKind.IMAGE_FAILED,
            record,
            reason=error.reason,
            message=str(error),
            detail={"attempt": str(attempt)},
        )

    def released(self, uid: str, epoch: int) -> None:
        """Emit that disks were removed."""
        self._events.emit(self._events.event(EventKind.DISKS_RELEASED, uid=uid, epoch=epoch))

    def listener(self, record: VmRecord) -> Listener:
        """Publish progress of a VM's image; the first call emits that a pull began."""
        tell = self.progress(record.uid)
        begun = False

        async def listen(done_bytes: int, total_bytes: int | None) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._emit(EventKind.IMAGE_PULLING, record)
            await tell(done_bytes, total_bytes)

        return listen

    def progress(self, uid: str) -> Listener:
        """Publish progress under `uid`, of a VM or of a pull's job."""
        subject = subjects.progress(self._node, uid, STEP)

        async def listen(done_bytes: int, total_bytes: int | None) -> None:
            value = Progress(uid=uid, step=STEP, done_bytes=done_bytes, total_bytes=total_bytes)
            await self._bus.publish(subject, value)

        return listen

    def _emit(self, kind: EventKind, record: VmRecord, **more: Any) -> None:
        self._events.emit(self._events.about(kind, record, **more))
