"""Finds ended operations that may be removed (ADR 0048)."""

from collections import Counter
from collections.abc import Callable

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.operations import StoredOperation
from virtbus.controller.core.quotas import Quota
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.volume import FillState

KEPT_NS = 60 * 10**9
"""An ended operation stays for this time, so that waiting clients see its result."""


def needed(fleet: Fleet) -> Callable[[OperationRecord], bool]:
    """Return a function that is True for an operation that another object waits for."""
    schedules = (held.record for held in fleet.operations.schedules.listed(None))
    of_schedules = {id_ for one in schedules for id_ in (one.run, one.backup)}
    return lambda record: record.id in of_schedules or _is_needed(record, fleet)


def surplus(fleet: Fleet, quota: Quota, now_ns: int) -> list[StoredOperation]:
    """Return the operations to remove, so that the number of operations is within the quota.

    Open operations count, too, but are never returned. An ended operation is returned if it ended
    at least KEPT_NS ago, and no other object waits for it. The operations that ended first are
    returned first. The number may stay above the quota.
    """
    operations = fleet.operations
    known = [(held, operations.status_of(held.record).status) for held in operations.all()]
    left, left_in_all = Counter(held.record.namespace for held, _ in known), len(known)
    is_needed, found = needed(fleet), []
    for held, status in sorted(known, key=lambda one: one[1].ended_ns):
        record = held.record
        if left[record.namespace] <= quota.per_namespace and left_in_all <= quota.in_all:
            continue
        if not status.ended or now_ns - status.ended_ns < KEPT_NS:
            continue
        if is_needed(record):
            continue
        left[record.namespace] -= 1
        left_in_all -= 1
        found.append(held)
    return found


def _is_needed(record: OperationRecord, fleet: Fleet) -> bool:
    """Return True if the operation's snapshot lacks data, or its volume is being filled or moved.

    A fill by another operation does not count.
    """
    if record.snapshot is not None:
        snapshot = fleet.volumes.snapshots.get(record.snapshot.namespace, record.snapshot.name)
        if snapshot is not None and snapshot.record.uid == record.snapshot.uid:
            return not snapshot.record.ready
    volume = fleet.volumes.get(record.namespace, record.name)
    if volume is None or volume.record.uid != record.uid:
        return False
    fill = volume.record.fill
    filling = fill is not None and fill.state is FillState.FILLING and fill.operation == record.id
    return filling or volume.record.has_open_move
