"""Caches the operations of the fleet and their statuses, as watches deliver them (ADR 0048).

`Operations.schedules` caches the backup schedules, which start operations.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from virtbus.controller.core.backup_schedules import BackupSchedules
from virtbus.controller.core.vm_keys import Stored
from virtbus.schemas.operation import OperationRecord, OperationStatus
from virtbus.schemas.operation_api import OperationView
from virtbus.schemas.records import read_operation, read_operation_status
from virtbus.schemas.subjects import operation_record, operation_status

StoredOperation = Stored[OperationRecord]


class StoredStatus(NamedTuple):
    """The status of an operation, and the revision of its key; 0 if the bus has no status."""

    status: OperationStatus
    revision: int


class Operations:
    """The operations by key. The cache may lag, so each decision needs a CAS write."""

    def __init__(self) -> None:
        self.schedules = BackupSchedules()
        self._stored: dict[str, StoredOperation] = {}
        self._statuses: dict[str, StoredStatus] = {}
        self._keys: dict[str, str] = {}
        """By id: the key of the operation."""
        self._open: dict[str, str] = {}
        """The namespaces of open operations, by key."""
        self._open_in: Counter[str] = Counter()
        self._of: dict[str, set[str]] = {}
        """By uid of a VM or volume: the keys of its operations."""
        self._seen = 0
        """The highest revision that the watch delivered since its complete list began."""

    # --- input ----------------------------------------------------------------------------
    def begin_list(self) -> None:
        """Forget the highest revision, because the next complete list may have lower ones."""
        self._seen = 0

    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process an operation or status from a watch.

        Raises:
            VirtbusError: the value is unreadable.
        """
        if not key.startswith("$KV.vm."):
            status = read_operation_status(key, value)
            self._statuses[key] = StoredStatus(status, revision)
            self._count(operation_record(status.node, status.id))
            return
        self._seen = max(self._seen, revision)
        self._store(key, StoredOperation(read_operation(key, value), revision))

    def apply(self, held: StoredOperation) -> None:
        """Store our own write, unless the watch has already reached its revision."""
        if held.revision > self._seen:
            self._store(operation_record(held.record.node, held.record.id), held)

    def _store(self, key: str, held: StoredOperation) -> None:
        self._stored[key] = held
        self._keys[held.record.id] = key
        self._of.setdefault(held.record.uid, set()).add(key)
        self._count(key)

    def _count(self, key: str) -> None:
        """Update the counts of open operations after a change of an operation or its status."""
        before = self._open.pop(key, None)
        if before is not None:
            self._open_in[before] -= 1
        held = self._stored.get(key)
        if held is not None and not self.status_of(held.record).status.ended:
            self._open[key] = held.record.namespace
            self._open_in[held.record.namespace] += 1

    def forget(self, key: str) -> None:
        """Drop an operation or a status that was purged."""
        seen = self._statuses.pop(key, None)
        if seen is not None:
            self._count(operation_record(seen.status.node, seen.status.id))
        known = self._stored.pop(key, None)
        if known is not None:
            self._count(key)
            self._keys.pop(known.record.id, None)
            self._of[known.record.uid].discard(key)
            if not self._of[known.record.uid]:
                del self._of[known.record.uid]

    # --- answers --------------------------------------------------------------------------
    def keys(self) -> set[str]:
        return set(self._stored)

    def status_keys(self) -> set[str]:
        return set(self._statuses)

    def of_id(self, id_: str) -> StoredOperation | None:
        return self._stored.get(self._keys.get(id_, ""))

    def status_of(self, record: OperationRecord) -> StoredStatus:
        """Return the last status of an operation; with revision 0 if the bus has none."""
        none = StoredStatus(OperationStatus(id=record.id, node=record.node), 0)
        return self._statuses.get(operation_status(record.node, record.id), none)

    def statuses(self) -> list[StoredStatus]:
        """Return all statuses, including those of removed operations."""
        return list(self._statuses.values())

    def count(self, namespace: str | None = None) -> int:
        """Return the number of open operations of a namespace; None: of all namespaces."""
        return len(self._open) if namespace is None else self._open_in[namespace]

    def open_of(self, uid: str) -> list[StoredOperation]:
        """Return the open operations of a VM or volume."""
        found = [self._stored[key] for key in self._of.get(uid, ())]
        return [held for held in found if not self.status_of(held.record).status.ended]

    def all(self) -> list[StoredOperation]:
        return sorted(self._stored.values(), key=lambda held: _order(held.record))

    def listed(self, namespace: str | None, after: str) -> Iterable[tuple[str, StoredOperation]]:
        """Yield sort keys and operations of a namespace (None: all) that follow the key `after`."""
        for held in self.all():
            key = _order(held.record)
            if key > after and namespace in {None, held.record.namespace}:
                yield key, held

    def show(self, held: StoredOperation, keep_s: float) -> OperationView:
        """Return the API view of an operation; an ended operation expires after `keep_s`."""
        record, status = held.record, self.status_of(held.record).status
        return shown(record, status, keep_s)


def _order(record: OperationRecord) -> str:
    return f"{record.created_ns:020d}/{record.id}"


def shown(record: OperationRecord, status: OperationStatus, keep_s: float) -> OperationView:
    """Return the API view of an operation, without the time of its expiry if it has not ended."""
    both = set(OperationView.model_fields)
    fields = record.model_dump(include=both) | status.model_dump(include=both - {"id", "node"})
    if status.ended:
        fields["expires_ns"] = status.ended_ns + int(keep_s * 1e9)
    if record.cancel and not status.ended and not status.message:
        fields["message"] = "it is being cancelled"
    return OperationView.model_validate(fields)


def expired(status: OperationStatus, now_ns: int, keep_s: float) -> bool:
    """Return True if the operation ended more than `keep_s` ago."""
    return status.ended and now_ns - status.ended_ns > keep_s * 1e9
