"""Observes snapshots: each has its data, on its node, until a delete."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.snapshot_changes import ref_of_snapshot
from virtbus.schemas.records import read_stored
from virtbus.schemas.snapshot import SnapshotRecord

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class SnapshotObserver:
    """The snapshots on the bus and on the hosts."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._records: dict[str, SnapshotRecord] = {}

    def wrote(self, entry: Entry) -> None:
        """A snapshot was written or purged."""
        if entry.kind is EntryKind.PURGE:
            self._records.pop(entry.key, None)
            return
        record = self._records[entry.key] = read_stored(SnapshotRecord, entry.key, entry.value)
        folder = ref_of_snapshot(record).folder
        if record.ready and not record.deleting and folder not in self._at(record.node):
            self._observer.wrong("I2", f"{folder} is ready, and {record.node} has no data of it")

    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield snapshots that have not ended, and data without a snapshot."""
        known = set()
        for record in self._records.values():
            folder = ref_of_snapshot(record).folder
            known.add((record.node, folder))
            if self._never_began(record):
                continue
            if record.deleting or not record.ready:
                yield "I8", f"snapshot {folder} is still being made or deleted"
            elif folder not in self._at(record.node):
                yield "I2", f"snapshot {folder} has lost its data"
        for host in self._observer.hosts.values():
            for folder in host.disk.snapshots if not host.copied else ():
                if (host.node, folder) not in known:
                    yield "I5", f"{host.name} has the data of snapshot {folder}, which is not there"

    def _never_began(self, record: SnapshotRecord) -> bool:
        """Return True if the controller of a restore died before it wrote the operation.

        The record of the replaced disks then stays until a person deletes it (ADR 0054).
        """
        begun = record.uid in self._observer.operations.begun
        return bool(record.replaced_by) and not record.ready and not begun

    def _at(self, node: str) -> set[str]:
        return set(self._observer.hosts[node].disk.snapshots)
