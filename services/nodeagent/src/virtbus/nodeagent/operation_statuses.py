"""Stores the statuses of a node's operations, and emits an event when one ends (ADR 0048)."""

import asyncio
import logging
from typing import NamedTuple

from virtbus.bus.client.event_recorder import EventRecorder
from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.records import read_operation_status
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

PROGRESS_S = 5.0
"""The minimum time between two writes that change only the progress of a status."""
_EVENTS = {
    OperationPhase.SUCCEEDED: EventKind.OPERATION_SUCCEEDED,
    OperationPhase.FAILED: EventKind.OPERATION_FAILED,
    OperationPhase.CANCELLED: EventKind.OPERATION_CANCELLED,
}


class _Seen(NamedTuple):
    """A status as the bus stores it; `at_s` is the loop's time of its last write from here."""

    status: OperationStatus
    revision: int
    at_s: float = 0.0


class OperationStatuses:
    """Reads and writes statuses of this node. A write expects the last known revision (CAS)."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._events = EventRecorder(bus, "nodeagent", node)
        self._seen: dict[str, _Seen] = {}

    def forget(self, id_: str) -> None:
        """Drop the status from memory, so that the next `get` reads the bus."""
        self._seen.pop(id_, None)

    def ended(self, id_: str) -> bool:
        """Return True if the status in memory has ended; False if no status is in memory."""
        seen = self._seen.get(id_)
        return seen is not None and seen.status.ended

    async def get(self, op: OperationRecord) -> OperationStatus:
        """Return the stored status, from memory or from the bus; raises BusError."""
        seen = self._seen.get(op.id)
        if seen is None:
            entry = await self._bus.get(subjects.operation_status(self._node, op.id))
            status, revision = OperationStatus(id=op.id, node=self._node), 0
            if entry is not None:
                revision = entry.revision
                status = self._read(entry, status)
            seen = self._seen[op.id] = _Seen(status, revision)
        return seen.status

    def _read(self, entry: Entry, none: OperationStatus) -> OperationStatus:
        if entry.kind is EntryKind.PURGE:  # a controller is removing the operation
            return none.after("cancel", self._bus.sources.time_ns())
        try:
            return read_operation_status(entry.key, entry.value)
        except VirtbusError as error:
            log.error("unreadable status: %s", error, extra={"code": "bad_record"})
            return none

    async def write(self, op: OperationRecord, status: OperationStatus) -> bool:
        """Store a changed status; return True if it was stored.

        A status that changed only its progress is stored at most once per PROGRESS_S.

        Raises:
            ConflictError: a controller ended the operation meanwhile.
            BusError: the write failed, or its outcome is unknown. The next `get` reads the bus,
                because an operation that has ended must do no further step.
        """
        seen = self._seen.get(op.id)
        if seen is None:
            return False  # `forget` was called meanwhile: the caller's next `get` reads the bus
        now_s = asyncio.get_running_loop().time()
        progress = {"done_bytes": status.done_bytes, "total_bytes": status.total_bytes}
        same = status == seen.status.model_copy(update=progress)
        if status == seen.status or (same and now_s - seen.at_s < PROGRESS_S):
            return False
        key = subjects.operation_status(self._node, op.id)
        try:
            revision = await self._bus.put(key, encode(status), expect=seen.revision)
        except BusError:
            self.forget(op.id)
            raise
        self._seen[op.id] = _Seen(status, revision, now_s)
        if status.ended:
            self._tell(op, status, revision)
        return True

    def _tell(self, op: OperationRecord, status: OperationStatus, revision: int) -> None:
        message = status.error.message if status.error is not None else status.message
        event = self._events.event(
            _EVENTS[status.phase],
            uid=op.uid,
            epoch=op.epoch,
            namespace=op.namespace,
            name=op.name,
            reason=status.error.reason if status.error is not None else "",
            message=message,
            detail={"operation": op.id, "kind": op.kind},
        )
        self._events.emit(event, f"{op.id}:{revision}")
        extra = {"code": f"operation_{status.phase.lower()}", "uid": op.uid}
        log.info("operation %s: %s %s", op.id, status.phase, message, extra=extra)
