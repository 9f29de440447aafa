"""Writes operations to the bus, each by one compare-and-set (ADR 0048)."""

from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.exports import refuse_other
from virtbus.controller.core.operations import StoredOperation, StoredStatus
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
from virtbus.schemas.operation import STEPS, OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.records import read_operation, read_operation_status
from virtbus.schemas.wire import encode

SERVE = STEPS["serve"][1].name


class OperationWrites:
    """Reads and writes operations and their statuses."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(self, record: OperationRecord) -> tuple[StoredOperation, bool]:
        """Write a new operation; return the stored operation, and False if it existed.

        Raises:
            VirtbusError: 409 `id_taken`: another operation has the id. 410 `deleted`: the operation
                was removed.
        """
        key, everywhere = _key(record), subjects.operation_anywhere(record.id)
        try:
            revision = await self._bus.put(key, encode(record), expect=0, expect_over=everywhere)
            return StoredOperation(record, revision), True
        except ConflictError:
            held = await self.latest(record.id)
        if held is None:
            message = f"the operation {record.id} has ended and was removed; use a new id"
            raise VirtbusError(Code.GONE, "deleted", message)
        refuse_other(held.record, record)
        return held, False

    async def latest(self, id_: str) -> StoredOperation | None:
        """Read an operation from the stream's leader; None if it does not exist."""
        entry = await self._bus.get(subjects.operation_anywhere(id_))
        return stored_in(entry, read_operation)

    async def prevent(self, node: str, id_: str) -> StoredOperation | None:
        """Return the operation; if it does not exist, write a purge marker that refuses its create.

        Raises ConflictError if the operation is created at the same time.
        """
        entry = await self._bus.get(subjects.operation_anywhere(id_))
        if entry is None:
            key = subjects.operation_record(node, id_)
            await self._bus.purge(key, expect=0, marker_ttl_s=MARKER_TTL_S, why=b"deleted")
        return stored_in(entry, read_operation)

    async def status(self, record: OperationRecord) -> StoredStatus:
        """Read the status from the stream's leader; a new status if it is missing or unreadable."""
        entry = await self._bus.get(subjects.operation_status(record.node, record.id))
        none = OperationStatus(id=record.id, node=record.node)
        return StoredStatus(none, 0) if entry is None else _status_of(entry, none)

    async def cancel(self, id_: str) -> StoredOperation | None:
        """Cancel an operation that its node has not begun, or ask the node to cancel it.

        Return None if the operation does not exist.

        Raises:
            VirtbusError:
                409 `operation_ended`: the operation has ended.
                409 `operation_final`: the operation is in its final step.
                503 `contended`: too many races were lost.
        """
        for _ in range(ATTEMPTS):
            held = await self.latest(id_)
            if held is None:
                return None
            seen = await self.status(held.record)
            if seen.status.ended or seen.status.is_final:
                raise _too_late(held.record, seen.status)
            try:
                if seen.revision == 0:
                    now_ns = self._bus.sources.time_ns()
                    await self._put_status(held.record, seen, seen.status.after("cancel", now_ns))
                elif not held.record.cancel:
                    return await self._mark(held, "cancel")
            except ConflictError:
                continue
            return held
        raise contended(f"the operation {id_}")

    async def finish(self, id_: str) -> StoredOperation | None:
        """Ask the node to end an operation of the kind `serve` as succeeded; may be repeated.

        Return None if the operation does not exist.

        Raises:
            VirtbusError:
                409 `not_served`: the node does not serve the disks now, or the operation is being
                cancelled.
                409 `operation_ended`: the operation has ended without such a request.
                503 `contended`: too many races were lost.
        """
        for _ in range(ATTEMPTS):
            held = await self.latest(id_)
            if held is None:
                return None
            status = (await self.status(held.record)).status
            if held.record.finish and status.phase in {
                OperationPhase.RUNNING,
                OperationPhase.SUCCEEDED,
            }:
                return held
            if status.ended:
                raise _too_late(held.record, status)
            if held.record.cancel or status.step != SERVE:
                message = f"no reader has the disks of {id_} now: `virtbus operation get {id_}`"
                raise VirtbusError(Code.CONFLICT, "not_served", message)
            try:
                return await self._mark(held, "finish")
            except ConflictError:
                continue
        raise contended(f"the operation {id_}")

    async def _mark(self, held: StoredOperation, field: str) -> StoredOperation:
        record = held.record.model_copy(update={field: True})
        revision = await self._bus.put(_key(record), encode(record), expect=held.revision)
        return StoredOperation(record, revision)

    async def fail(self, record: OperationRecord, error: ErrorBody) -> None:
        """End an open operation as Failed; raises ConflictError."""
        seen = await self.status(record)
        status = seen.status.after("fail", self._bus.sources.time_ns(), step="", error=error)
        if status != seen.status:
            await self._put_status(record, seen, status)

    async def _put_status(
        self, record: OperationRecord, seen: StoredStatus, status: OperationStatus
    ) -> None:
        key = subjects.operation_status(record.node, record.id)
        await self._bus.put(key, encode(status), expect=seen.revision)

    async def remove(self, held: StoredOperation) -> None:
        """Purge an operation, then its status; raises ConflictError.

        The node removes the operation's file when it sees the record's purge marker. The record is
        purged first: an agent that sees a record without a status would begin the operation again.
        """
        record = held.record
        await self._bus.purge(
            _key(record), expect=held.revision, marker_ttl_s=MARKER_TTL_S, why=b"deleted"
        )
        await self.remove_status(await self.status(record))

    async def remove_status(self, seen: StoredStatus) -> None:
        """Purge the status of a removed operation; raises ConflictError."""
        if seen.revision:
            key = subjects.operation_status(seen.status.node, seen.status.id)
            await self._bus.purge(key, expect=seen.revision, marker_ttl_s=MARKER_TTL_S)


def _status_of(entry: Entry, none: OperationStatus) -> StoredStatus:
    if entry.kind is EntryKind.PURGE:
        return StoredStatus(none, entry.revision)
    try:
        return StoredStatus(read_operation_status(entry.key, entry.value), entry.revision)
    except VirtbusError:
        return StoredStatus(none, entry.revision)


def _key(record: OperationRecord) -> str:
    return subjects.operation_record(record.node, record.id)


def _too_late(record: OperationRecord, status: OperationStatus) -> VirtbusError:
    if status.ended:
        message = f"the operation {record.id} has ended: {status.phase}"
        return VirtbusError(Code.CONFLICT, "operation_ended", message)
    message = f"the operation {record.id} is in its final step, and ends by itself"
    return VirtbusError(Code.CONFLICT, "operation_final", message)
