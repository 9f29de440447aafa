"""Ends the dependence of disks on layers; each request may be repeated (ADR 0080)."""

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.disk_copy import lock_disk, open_disk, used_bytes
from virtbus.imaged.edge.disk_places import DiskPlace, DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.imaged.edge.flatten_job import flatten, open_writable
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS
from virtbus.schemas.snapshot import SnapshotDisk

log = logging.getLogger(__name__)

MERGE, PUBLISH = (step.name for step in STEPS["flatten"])
Flattener = Callable[
    [ExportSource, Path | None, TransferLimits, Callable[[], Awaitable[None]]], Awaitable[None]
]
"""Pulls the data of layers up into the disk, as `flatten_job.flatten` does."""


@dataclass(frozen=True, slots=True)
class FlattenParts:
    """The parts of imaged that merges use."""

    locks: DiskLocks
    places: DiskPlaces
    space: DiskSpace
    threads: DiskThreads
    limits: TransferLimits


class Flattening:
    """The merges of layers on a node. During a merge no other work of imaged uses the disk."""

    def __init__(self, jobs: DiskJobs, parts: FlattenParts, flattener: Flattener = flatten) -> None:
        self._jobs = jobs
        self._parts = parts
        self._flatten = flattener

    async def do(self, want: FlattenWork) -> WorkState:
        """Ensure that disks rest on no layer, or cancel this work.

        After a cancel, the disks have the same content, and some disks may rest on no layer. With
        `want.live` the QEMU of the guest merges the layers: see `_live`.

        Raises:
            VirtbusError: the failure of the attempt before this request. The next request begins
                another attempt. 409 `disk_in_use`, `disk_unreadable`. 422 `copy_failed`,
                `sandbox_unavailable`. 503 `disk_full`, `store_error`. The errors of
                `DiskPlaces.of`.
        """
        if want.live:
            return await self._live(want)
        done = partial(self._done, want)
        if want.do == "ensure":
            return await self._jobs.ensure(want.id, want.uid, done, partial(self._run, want))
        late = await self._jobs.end(want.id) or await done()
        return late or WorkState(state="none")

    async def _live(self, want: FlattenWork) -> WorkState:
        """Note the disks that a guest's QEMU has merged, or check the free space for its writes."""
        threads, places = self._parts.threads, self._parts.places
        if want.merged:
            refs = [disk.ref for disk in want.disks if disk.ref is not None]
            async with self._parts.locks.held(want.uid, *refs):
                for disk in want.disks:
                    inode = want.merged.get(disk.name, 0)
                    of_disk = (want.uid, disk.name, disk.ref)
                    await threads.run(lambda: places.note_merged(*of_disk, inode))  # noqa: B023
            return WorkState(state="done")
        below_bytes = 0
        for disk in want.disks if want.whole else ():
            place = await self._place(want, disk)
            below_bytes += await threads.run(lambda: place.layers_bytes)  # noqa: B023
        await threads.run(self._parts.space.check_room, below_bytes)
        return WorkState(state="working", step=MERGE)

    async def _done(self, want: FlattenWork) -> WorkState | None:
        for disk in want.disks:
            if (await self._place(want, disk)).layers:
                return None
        return WorkState(state="done")

    async def _place(self, want: FlattenWork, disk: SnapshotDisk) -> DiskPlace:
        return await self._parts.threads.run(self._parts.places.of, want.uid, disk.name, disk.ref)

    async def _run(self, want: FlattenWork, job: Job) -> None:
        refs = [disk.ref for disk in want.disks if disk.ref is not None]
        job.step = MERGE
        async with self._jobs.slots, self._parts.locks.held(want.uid, *refs):
            if not want.may_begin:
                message = f"{want.name} was started before its disks were merged; repeat"
                raise VirtbusError(Code.CONFLICT, "disk_in_use", message)
            for disk in want.disks:
                place = await self._place(want, disk)
                if place.layers:
                    await self._merge(place, job)
        log.info("%s rests on no layers", want.name, extra={"code": "flattened", "uid": want.uid})

    async def _merge(self, place: DiskPlace, job: Job) -> None:
        threads, space = self._parts.threads, self._parts.space
        below_bytes = await threads.run(lambda: place.layers_bytes)
        await threads.run(space.check_room, below_bytes)
        await threads.run(_refuse_used, place.path)
        with ExitStack() as opened:
            found = opened.enter_context(await threads.run(place.opened))
            writable = await threads.run(open_writable, opened, place.path)
            source = replace(found, disk=writable)
            before_bytes, done_bytes = used_bytes(writable), job.done_bytes
            job.total_bytes += below_bytes

            async def look() -> None:
                await threads.run(space.check_room, 0)
                grown_bytes = used_bytes(writable) - before_bytes
                job.done_bytes = done_bytes + min(max(grown_bytes, 0), below_bytes)

            image = Path(place.lowest.backing_path) if place.lowest.backing_path else None
            await self._flatten(source, image, self._parts.limits, look)
            await threads.run(os.fsync, writable)
            job.done_bytes = done_bytes + below_bytes


def _refuse_used(path: Path) -> None:
    """Raise 409 `disk_in_use` if a QEMU has the disk open.

    During the merge, the sandbox's user owns the disk, so no guest may have the disk open.
    """
    with ExitStack() as opened:
        lock_disk(open_disk(opened, path))
