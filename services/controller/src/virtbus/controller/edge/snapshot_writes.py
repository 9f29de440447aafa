"""Writes snapshots to the bus (ADR 0054)."""

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.snapshot_changes import create_step
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.records import read_snapshot
from virtbus.schemas.snapshot import SnapshotRecord


class SnapshotWrites(NamedWrites[SnapshotRecord]):
    """Reads and writes snapshots."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, "snapshot", subjects.snapshot_record, read_snapshot, create_step)
