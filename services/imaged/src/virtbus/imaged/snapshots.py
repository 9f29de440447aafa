"""Makes, restores and removes snapshots, one job for each operation (ADR 0054).

Each request may be repeated. A restore keeps the replaced disks as a snapshot, by second names of
the same files, so that no data is copied twice.
"""

import asyncio
import logging
import os
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.edge.disk_copy import DiskCopy, lock_disk, open_disk, used_bytes
from virtbus.imaged.edge.layered_disks import stage_on_layer
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.snapshot_files import SnapshotNote
from virtbus.imaged.layering import Layering, discard, refuse_long
from virtbus.imaged.snapshot_parts import SnapshotParts, finished, snapshot_lock, translated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.layer import layer_name
from virtbus.schemas.node_rpc import HeldResources, WorkState
from virtbus.schemas.operation import STEPS
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef
from virtbus.schemas.snapshot_rpc import SnapshotWork

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Number of copies at a time: each copy takes the disk's bandwidth."""
SOON_S = 0.3
"""Time that an answer waits for a copy: enough for reflinks. The agent asks again after 1 s."""
COPY, _, PUBLISH = (step.name for step in STEPS["snapshot"])
REPLACE = STEPS["restore"][-1].name


class Snapshots:
    """The snapshots of a node. While a disk is copied, nothing makes, grows or removes it."""

    def __init__(self, jobs: DiskJobs, parts: SnapshotParts) -> None:
        self._jobs = jobs
        self._parts = parts
        self._layering = Layering(jobs, parts)
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def recover(self) -> None:
        """Continue restores and layered snapshots that had written their journal before a crash.

        The disks are locked on return, so that no guest starts while only some disks are replaced.

        Raises:
            VirtbusError: 503 `store_error`.
        """
        files = self._parts.files
        for note in await self._parts.threads.run(translated, files.interrupted):
            held = AsyncExitStack()
            refs = [disk.ref for disk in note.disks if disk.ref is not None]
            await held.enter_async_context(self._parts.locks.held(note.uid, *refs))
            if note.layered:
                await self._layering.resume(held, note)
                continue
            self._jobs.begin(note.ref.uid, note.uid, partial(self._continue, held, note))

    async def _continue(self, held: AsyncExitStack, note: SnapshotNote, job: Job) -> None:
        job.step, job.final = REPLACE, True
        async with held:
            await self._parts.forward(self._parts.files.replace_disks, note)
        extra = {"code": "restore_completed", "uid": note.uid}
        log.warning("completed the interrupted restore of %s", note.name, extra=extra)

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: SnapshotWork) -> WorkState:
        """Ensure or cancel a snapshot or a restore; see `SnapshotWork`.

        Raises:
            VirtbusError: the failure of an earlier attempt, or of this attempt within SOON_S. The
                next request begins another attempt. 404 `snapshot_missing`. 409 `disk_in_use`,
                `disk_unreadable`, `disks_differ`, `chain_too_long`. 503 `disk_full`, `store_error`.
                The errors of `DiskPlaces.of`.
        """
        if want.layered:
            return await self._layering.do(want)
        if want.do == "ensure":
            done, work = partial(finished, self._parts, want.snapshot), partial(self._run, want)
            return await self._jobs.ensure(want.id, want.uid, done, work, soon_s=SOON_S)
        late = await self._jobs.end(want.id) or await finished(self._parts, want.snapshot)
        if late is not None:
            return late
        await self._parts.threads.run(translated, discard, self._parts.files, want)
        return WorkState(state="none")

    async def release(self, ref: SnapshotRef) -> bool:
        async with self._parts.locks.of(snapshot_lock(ref)):
            return await self._parts.threads.run(self._parts.files.remove, ref.folder)

    async def held(self, after: str) -> HeldResources:
        return await self._parts.threads.run(self._parts.files.page, after)

    # --- the job ----------------------------------------------------------------------------
    async def _run(self, want: SnapshotWork, job: Job) -> None:
        refs = [disk.ref for disk in want.disks if disk.ref is not None]
        snapshots = {
            snapshot_lock(one) for one in (want.snapshot, want.restored) if one is not None
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._slots)
            await stack.enter_async_context(self._parts.locks.held(want.uid, *refs))
            for lock in sorted(snapshots):
                await stack.enter_async_context(self._parts.locks.of(lock))
            try:
                await self._make(want, job)
            except OSError as error:
                raise store_error(error) from error
            finally:
                if not job.final:
                    await self._parts.threads.run(translated, discard, self._parts.files, want)
        extra = {"code": "snapshot_done", "uid": want.uid}
        log.info("%s of %s is complete", want.snapshot.name, want.name, extra=extra)

    async def _make(self, want: SnapshotWork, job: Job) -> None:
        threads, files, folder = self._parts.threads, self._parts.files, want.snapshot.folder
        if not want.may_begin:
            message = f"{want.name} was started before its disks were copied; stop it, then repeat"
            raise VirtbusError(Code.CONFLICT, "disk_in_use", message)
        restored, disks = await threads.run(self._chosen, want)
        note = SnapshotNote(
            ref=want.snapshot, resource=want.resource, uid=want.uid, name=want.name, disks=disks
        )
        await threads.run(files.begin, folder)
        job.step = COPY
        with ExitStack() as opened:
            present = await threads.run(self._opened, opened, want.uid, disks)
            if restored is not None:
                await self._stage(want, restored, disks, job)
                await threads.run(files.note_begun, note)
                job.step, job.final = REPLACE, True
                await self._parts.forward(self._parts.files.replace_disks, note)
                return
            job.total_bytes = sum(used_bytes(one) for one in present.values())
            for disk, source in present.items():
                target = await threads.run(files.new_disk, folder, disk)
                opened.callback(os.close, target)
                await self._copy(source, target, job)
                await threads.run(files.freeze, folder, disk, target)
            job.step = PUBLISH
            await threads.run(files.publish, note.model_copy(update={"size_bytes": job.done_bytes}))
            job.final = True

    async def _stage(
        self,
        want: SnapshotWork,
        restored: SnapshotNote,
        disks: tuple[SnapshotDisk, ...],
        job: Job,
    ) -> None:
        """Stage disks with the content of `restored` next to the present disks.

        The staged disks rest on the layers of `restored`, or are copies if `restored` has no
        layers. The present disks get second names in the snapshot that keeps them.
        """
        threads, files = self._parts.threads, self._parts.files
        with ExitStack() as opened:
            for disk in disks:
                if restored.layered:
                    await threads.run(translated, self._stage_on_layer, want.uid, disk, restored)
                else:
                    path = files.path(restored.ref.folder, disk.name)
                    source = await threads.run(open_disk, opened, path)
                    job.total_bytes += used_bytes(source)
                    target = await threads.run(files.stage, want.uid, disk)
                    opened.callback(os.close, target)
                    await self._copy(source, target, job)
                    await threads.run(os.fsync, target)
                place = files.place(want.uid, disk)
                await threads.run(files.keep, want.snapshot.folder, disk.name, place)

    async def _copy(self, source: int, target: int, job: Job) -> None:
        """Copy an open disk. A reflink needs no free space."""
        threads, space = self._parts.threads, self._parts.space
        copy = DiskCopy(source, target)
        if await threads.run(copy.clone):
            return
        await threads.run(space.check_room, used_bytes(source))
        while done := await threads.run(copy.step):
            job.done_bytes += done
            await threads.run(space.check_room, 0)

    # --- in a disk thread -------------------------------------------------------------------
    def _stage_on_layer(self, uid: str, disk: SnapshotDisk, restored: SnapshotNote) -> None:
        files = self._parts.files
        frozen = files.layers.read(layer_name(restored.ref.uid, disk.name))
        refuse_long(disk, len(files.layers.chain(frozen)[0]) + 1)
        layer = files.frozen_path(restored, disk.name)
        stage_on_layer(files, uid, disk, layer, frozen.virtual_size_bytes)

    def _chosen(self, want: SnapshotWork) -> tuple[SnapshotNote | None, tuple[SnapshotDisk, ...]]:
        if want.restored is None:
            return None, want.disks
        note = self._parts.files.complete(want.restored.folder)
        if note is None:
            message = f"the node has no complete data of the snapshot {want.restored.name}"
            raise VirtbusError(Code.NOT_FOUND, "snapshot_missing", message)
        present = {one.name: one for one in want.disks}
        for frozen in note.disks:
            self._refuse_unlike(want, note, frozen, present.get(frozen.name))
        return note, tuple(present[frozen.name] for frozen in note.disks)

    def _refuse_unlike(
        self, want: SnapshotWork, note: SnapshotNote, frozen: SnapshotDisk, now: SnapshotDisk | None
    ) -> None:
        """Raise 409 if the frozen disk may not replace the disk of the same name.

        Both disks must be volumes, or none. Both must rest on an image, or none. If the snapshot is
        of the same VM or volume, both disks must be the same volume. A volume must be large enough
        for the frozen disk.
        """
        kept = self._parts.files.frozen(note, frozen.name)
        folders = [one.ref.folder if one is not None and one.ref else "" for one in (frozen, now)]
        same = want.uid != note.uid or folders[0] == folders[1]
        if now is None or kept is None or not same or bool(folders[0]) != bool(folders[1]):
            raise _differs(want, frozen.name, "it does not have that disk")
        found = self._parts.places.of(want.uid, now.name, now.ref).lowest
        lowest = self._parts.files.layers.chain(kept)[1]
        if bool(found.backing_path) != bool(lowest.backing_path):
            raise _differs(want, frozen.name, "only one of both begins with an image")
        if now.ref is not None and kept.virtual_size_bytes > now.ref.size_bytes:
            size = format_bytes(kept.virtual_size_bytes)
            raise _differs(want, frozen.name, f"its volume is smaller than {size}")

    def _opened(
        self, opened: ExitStack, uid: str, disks: tuple[SnapshotDisk, ...]
    ) -> dict[str, int]:
        found = {}
        for disk in disks:
            place = self._parts.places.of(uid, disk.name, disk.ref)
            found[disk.name] = descriptor = open_disk(opened, place.path)
            lock_disk(descriptor)
        return found


def _differs(want: SnapshotWork, disk: str, why: str) -> VirtbusError:
    message = f"the disk {disk} of the snapshot cannot replace one of {want.name}: {why}"
    return VirtbusError(Code.CONFLICT, "disks_differ", message)
