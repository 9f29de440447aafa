"""Observes operations: an end is final, and after the faults every operation has ended."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.schemas.operation import ENDED, OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.records import read_operation, read_operation_status

if TYPE_CHECKING:
    from tests.sim.observer import Observer


KEEP_S = 1200
"""By the clocks, which a `pace` makes faster: operations that have ended are removed in a seed."""
SWEPT_S = 75.0
"""The time, on the loop's clock, in which a leader removes an operation."""


class OperationObserver:
    """The operations on the bus and the files of exports on the hosts."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._records: dict[str, OperationRecord] = {}
        self.statuses: dict[str, OperationStatus] = {}
        self.begun: set[str] = set()
        """The ids of all operations that were ever on the bus."""
        self.ends: dict[str, OperationPhase] = {}
        """The ends of all operations that have ended, also of those that were removed."""

    def wrote(self, stream: str, entry: Entry) -> None:
        """An operation or a status was written or purged."""
        known = self._records if stream == "KV_vm" else self.statuses
        if entry.kind is EntryKind.PURGE:
            known.pop(entry.key.rpartition(".")[2], None)
        elif stream == "KV_vm":
            record = read_operation(entry.key, entry.value)
            if record.id not in self.begun:
                self._observer.backups.began(record)
            self._records[record.id] = record
            self.begun.add(record.id)
        else:
            self._status(read_operation_status(entry.key, entry.value))

    def _status(self, status: OperationStatus) -> None:
        before = self.statuses.get(status.id)
        if before is not None and before.phase in ENDED and before != status:
            self._wrong(f"{status.id} ended as {before.phase}, and is {status.phase} now")
        if status.phase is OperationPhase.SUCCEEDED and not self._has_result(status.id):
            self._wrong(f"{status.id} succeeded without a file")
        self.statuses[status.id] = status
        if status.ended:
            self.ends[status.id] = status.phase

    def _has_result(self, id_: str) -> bool:
        """Return True if a host has the file of an export, or the volume of a fill."""
        record = self._records.get(id_)
        if record is not None and record.kind in {"backup", "verify"}:
            return self._observer.backups.has_result(record)
        ref = record.ref if record is not None and record.kind == "fill" else None
        made = record.snapshot if record is not None else None
        disks = [host.disk for host in self._observer.hosts.values()]
        if ref is not None:
            return any(ref.folder in disk.volumes for disk in disks)
        if made is not None:
            return any(made.folder in disk.snapshots for disk in disks)
        return any(id_ in disk.exports for disk in disks)

    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield operations that have not ended, and those that stay after their time."""
        pace = self._observer.loop.pace
        until_ns = self._observer.slowest_ns() - int((KEEP_S + SWEPT_S * pace) * 1e9)
        for record in self._records.values():
            status = self.statuses.get(record.id)
            young = self._observer.backups.is_young(record.id)
            if (status is None or not status.ended) and not young:
                phase = status.phase if status is not None else "new"
                yield "I8", f"operation {record.id} of {record.uid} on {record.node} is {phase}"
            elif status is not None and 0 < status.ended_ns < until_ns and not young:
                yield "I5", f"operation {record.id} has ended, and is not removed"

    def _wrong(self, what: str) -> None:
        self._observer.wrong("I2", what)
