"""Publishes imaged's `ImageReady` messages, events and progress."""

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.step_reporter import StepEvents, StepReporter
from virtbus.imaged.single_flight import Listener
from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind
from virtbus.schemas.image import Progress
from virtbus.schemas.vm import VmRecord

EVENTS = StepEvents(
    "image", EventKind.IMAGE_READY, EventKind.IMAGE_FAILED, EventKind.DISKS_RELEASED
)


class DiskReporter(StepReporter):
    """Publishes the `ImageReady` messages and events of disks, and the progress of images."""

    def __init__(self, bus: Bus, node: str) -> None:
        super().__init__(bus, "imaged", node, EVENTS)

    def listener(self, record: VmRecord) -> Listener:
        """Return a listener that publishes the progress of a VM's image.

        The first call of the listener also emits the event that a pull began.
        """
        tell = self.progress(record.uid)
        begun = False

        async def listen(done_bytes: int, total_bytes: int | None) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self.emit(self.about(EventKind.IMAGE_PULLING, record))
            await tell(done_bytes, total_bytes)

        return listen

    def progress(self, uid: str) -> Listener:
        """Return a listener that publishes progress; `uid` is the VM's, or that of a pull's job."""
        subject = subjects.progress(self._node, uid, EVENTS.step)

        async def listen(done_bytes: int, total_bytes: int | None) -> None:
            value = Progress(
                uid=uid, step=EVENTS.step, done_bytes=done_bytes, total_bytes=total_bytes
            )
            await self._bus.publish(subject, value)

        return listen
