"""Finds the unfinished copies and restores that need a snapshot's data."""

from collections.abc import Iterator

from virtbus.controller.core.fleet import Fleet
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.snapshot import SnapshotRecord, SnapshotRef


def users_of(uid: str, fleet: Fleet) -> Iterator[str]:
    """Yield the volumes that are being filled from a snapshot, and its unfinished restores."""
    volumes = (fleet.volumes.at(key) for key in sorted(fleet.volumes.filling))
    for held in volumes:
        fill = held.record.fill if held is not None and not held.record.deleting else None
        if held is not None and fill is not None and _is(fill.source.snapshot, uid):
            yield f"the volume {held.record.name}"
    for one in fleet.operations.all():
        ended = fleet.operations.status_of(one.record).status.ended
        if not ended and _is(one.record.restored, uid):
            yield f"the restore {one.record.id}"


def _is(ref: SnapshotRef | None, uid: str) -> bool:
    return ref is not None and ref.uid == uid


def refuse_used(record: SnapshotRecord, fleet: Fleet) -> None:
    """Raise 409 `snapshot_in_use`, with the users, if a snapshot is being copied or restored.

    A snapshot that is already being deleted is never refused.
    """
    users = list(users_of(record.uid, fleet))
    if users and not record.deleting:
        message = (
            f"{record.name} is being copied by {', '.join(users[:3])}; repeat when the copy has "
            "ended, or cancel it with `virtbus operation cancel`"
        )
        raise VirtbusError(Code.CONFLICT, "snapshot_in_use", message, after_ms=5000)
