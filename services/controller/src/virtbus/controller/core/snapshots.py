"""Caches the snapshots of the fleet, from the watch of the bucket `vm` (ADR 0054)."""

from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.vm_keys import StoredSnapshot
from virtbus.schemas.records import read_snapshot
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.snapshot_api import SnapshotList
from virtbus.schemas.subjects import snapshot_record


class Snapshots(NamedRecords[SnapshotRecord]):
    """The snapshots by key, and in `open` those that the leader must complete or remove."""

    def __init__(self) -> None:
        super().__init__(read_snapshot, lambda one: snapshot_record(one.namespace, one.name))
        self.open: set[str] = set()
        """The keys of snapshots that are being deleted, or are neither complete nor lost."""

    def forget(self, key: str) -> None:
        """Drop a snapshot that was purged, or that a complete list does not contain."""
        self.open.discard(key)
        super().forget(key)

    def _store(self, key: str, held: StoredSnapshot) -> None:
        super()._store(key, held)
        record = held.record
        if record.deleting or not (record.ready or record.lost):
            self.open.add(key)

    # --- answers --------------------------------------------------------------------------
    def get(self, namespace: str, name: str) -> StoredSnapshot | None:
        return self.at(snapshot_record(namespace, name))

    def selected(self, want: SnapshotList) -> list[StoredSnapshot]:
        """Return the snapshots that a list request selects, by namespace and name."""
        sources = {("vm", want.vm), ("volume", want.volume)} - {("vm", None), ("volume", None)}
        return [
            held
            for held in self.listed(want.namespace)
            if not sources or (held.record.resource, held.record.source) in sources
        ]

    def on(self, node: str) -> list[StoredSnapshot]:
        """Return the snapshots with data on a node."""
        found = self.listed(None)
        return [one for one in found if one.record.node == node and not one.record.lost]
