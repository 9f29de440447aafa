"""Defines the parts of imaged that snapshots use, and functions for all kinds of snapshots."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.snapshot_files import SnapshotFolders, SnapshotNote
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.snapshot import SnapshotRef

log = logging.getLogger(__name__)

T = TypeVar("T")
AGAIN_S = 1.0
"""Delay before a retry of a final step."""


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """The parts of imaged that snapshots use."""

    locks: DiskLocks
    places: DiskPlaces
    files: SnapshotFolders
    space: DiskSpace
    threads: DiskThreads

    async def forward(self, step: Callable[[SnapshotNote], None], note: SnapshotNote) -> None:
        """Repeat a final step until it succeeds, because the work cannot be undone any more."""
        while True:
            try:
                await self.threads.run(step, note)
            except VirtbusError as error:
                extra = {"code": error.reason, "uid": note.uid}
                log.error("the disks of %s are tried again: %s", note.name, error, extra=extra)
                await asyncio.sleep(AGAIN_S)
            else:
                return


async def finished(parts: SnapshotParts, ref: SnapshotRef) -> WorkState | None:
    """Return the state `done` if a snapshot is complete, otherwise None."""
    note = await parts.threads.run(parts.files.complete, ref.folder)
    if note is None:
        return None
    size = note.size_bytes
    return WorkState(state="done", done_bytes=size, total_bytes=size)


def snapshot_lock(ref: SnapshotRef) -> str:
    """Return the name of the lock of a snapshot."""
    return f"snapshot {ref.folder}"


def translated(call: Callable[..., T], *args: object) -> T:
    """Return `call(*args)`; raise VirtbusError for an error of the file system."""
    try:
        return call(*args)
    except OSError as error:
        raise store_error(error) from error
