"""Writes snapshots to the bus: each create, change and end is one compare-and-set (ADR 0054)."""

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.snapshot_changes import refuse_taken
from virtbus.controller.core.vm_keys import StoredSnapshot
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.records import read_snapshot
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.wire import encode


class SnapshotWrites:
    """The controller's writes of snapshots."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(self, record: SnapshotRecord) -> tuple[StoredSnapshot, bool]:
        """Write a new snapshot; return it, and False if it existed.

        Raises:
            VirtbusError: as `refuse_taken`; 410 the uid was deleted; 503 too many lost races.
            BusError: nothing happened, or the outcome is unknown.
        """
        key, expect = _key(record), 0
        for _ in range(ATTEMPTS):
            try:
                revision = await self._bus.put(key, encode(record), expect=expect)
                return StoredSnapshot(record, revision), True
            except ConflictError:
                entry = await self._bus.get(key)
            held = stored_in(entry, read_snapshot)
            if held is not None:
                refuse_taken(held.record, record)
                return held, False
            if entry is not None and entry.why == record.uid.encode():
                message = f"uid {record.uid} was deleted; use a new uid"
                raise VirtbusError(Code.GONE, "deleted", message)
            expect = entry.revision if entry is not None else 0
        raise contended(f"the snapshot {record.name}")

    async def latest(self, namespace: str, name: str) -> StoredSnapshot | None:
        """Return a snapshot from the stream's leader; raises UnreadableValueError."""
        entry = await self._bus.get(subjects.snapshot_record(namespace, name))
        return stored_in(entry, read_snapshot)

    async def replace(self, held: StoredSnapshot, record: SnapshotRecord) -> StoredSnapshot:
        """CAS the snapshot over the revision that was read; raises ConflictError."""
        revision = await self._bus.put(_key(record), encode(record), expect=held.revision)
        return StoredSnapshot(record, revision)

    async def end(self, held: StoredSnapshot) -> int:
        """Purge the snapshot at the revision that was read; raises ConflictError.

        The marker has the uid, so that a late create of it is refused.
        """
        record = held.record
        return await self._bus.purge(
            _key(record), expect=held.revision, marker_ttl_s=MARKER_TTL_S, why=record.uid.encode()
        )


def _key(record: SnapshotRecord) -> str:
    return subjects.snapshot_record(record.namespace, record.name)
