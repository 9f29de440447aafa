"""Makes, lists and removes backups; each request may be repeated (ADR 0068).

imaged copies the disks of a VM that is off. The QEMU of a running guest writes its disks to staged
files, which imaged then stores. The rename of the finished folder is the final step.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.bus.runtime.recent import Recent
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.imaged.backup_parents import parent_of
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.backup_files import BackupFiles, expire
from virtbus.imaged.edge.backup_staging import BackupStaging, check_file
from virtbus.imaged.edge.digests import Digester, freeze
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, convert
from virtbus.imaged.edge.increments import missing, push
from virtbus.imaged.exports import Converter
from virtbus.schemas.backup import (
    MAX_TEXT,
    BackedDisk,
    BackupDisk,
    BackupManifest,
    BackupMode,
    BackupsAsk,
    BackupWork,
    HeldBackups,
    bitmap_name,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS, ExportFormat

log = logging.getLogger(__name__)

STAGE, PUSH, STORE, PUBLISH = (step.name for step in STEPS["backup"])
READ = STEPS["verify"][0].name
KEEP_S = 25 * 3600.0
"""Age at which the remains of an attempt are removed, if the node missed the operation's end."""
EXPIRE_S = 600.0
REMEMBERED = 1000
Write = Callable[[BackupWork, BackupDisk, Job, str], Awaitable[BackupDisk]]
"""Writes a disk of a backup, and returns its description. The string is the name of the parent's
bitmap; empty for a full backup."""
Pusher = Callable[
    [ExportSource, int, str, TransferLimits, Callable[[], Awaitable[None]]], Awaitable[None]
]
"""Writes an increment. `increments.push` is the default."""


@dataclass(frozen=True, slots=True)
class BackupParts:
    """The components of imaged that backups use.

    `staged` is the space for staged files, `stored` the space of the backup directory.
    """

    locks: DiskLocks
    places: DiskPlaces
    files: BackupFiles | None
    """None if this node has no directory for backups."""
    staging: BackupStaging
    """The files that the QEMU of a guest writes, for backups and for readings (ADR 0079)."""
    staged: DiskSpace
    stored: DiskSpace | None
    threads: DiskThreads
    limits: TransferLimits
    sources: Sources = REAL

    @property
    def directory(self) -> BackupFiles:
        """Return the directory of backups; raises VirtbusError 422 `backups_off`."""
        if self.files is None:
            message = "this node has no directory for backups: set backup_dir in its imaged.toml"
            raise VirtbusError(Code.UNSUPPORTED, "backups_off", message)
        return self.files


class Backups:
    """The backups of a node."""

    def __init__(
        self,
        jobs: DiskJobs,
        parts: BackupParts,
        converter: Converter = convert,
        pusher: Pusher = push,
    ) -> None:
        self._jobs = jobs
        self._parts = parts
        self._convert = converter
        self._push = pusher
        self._staging = KeyedLock()
        self._stagings: Recent[str, WorkState] = Recent(REMEMBERED)
        """The answers to requests that stage files, by attempt."""

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: BackupWork) -> WorkState:
        """Ensure or cancel a backup; see `BackupWork`.

        Raises:
            VirtbusError: the error with which an earlier attempt has failed. The next request
                begins another attempt. 404 `disk_missing`. 409 `backup_lost`, `backup_damaged`,
                `disk_damaged`, `disk_in_use`, `disk_mismatch`, `no_parent`. 422 `copy_failed`,
                `backups_off`, `sandbox_unavailable`. 503 `disk_full`, `store_error`,
                `backup_dir_missing`.
        """
        files, threads = self._parts.directory, self._parts.threads
        if want.do == "cancel":
            late = await self._jobs.end(want.id) or await self._done(want.id)
            if late is None:
                await threads.run(files.drop, want.id)
            return late or WorkState(state="none")
        if not want.live or want.pushed:
            done = partial(self._done_or_refused, want)
            work = partial(self._store if want.live else self._copy_all, want)
            return await self._jobs.ensure(want.id, want.uid, done, work)
        if (found := await self._done(want.id)) is not None:
            return found
        if want.bitmaps is not None:
            async with self._staging.of(want.id):  # repeats of a hung request use no more threads
                return await self._stage(want)
        if not await threads.run(files.keep, want.id):
            raise _lost(want)
        await threads.run(self._parts.staged.check_room, 0)
        return WorkState(state="working", step=PUSH)

    async def held(self, want: BackupsAsk) -> HeldBackups:
        """List, get or delete backups.

        Raises:
            VirtbusError: 409 `backup_needed`; 503 `store_error`.
        """
        files, threads = self._parts.files, self._parts.threads
        if files is None:
            return HeldBackups(enabled=False)
        if want.do == "list":
            return await threads.run(files.page, want.after)
        if want.id is None:
            return HeldBackups()
        found = await threads.run(files.held, want.id)
        if want.do == "delete":
            await threads.run(files.remove, want.id)
            if found is not None:
                log.info("backup %s removed", want.id, extra={"code": "backup_removed"})
        return HeldBackups(items=() if found is None else (found,))

    async def expire_forever(self) -> None:
        parts = self._parts
        while True:
            what = parts.staging, parts.files, KEEP_S, self._jobs.ids
            for name in await parts.threads.run(expire, *what):
                log.info("removed %s: old", name, extra={"code": "backup_removed"})
            await asyncio.sleep(EXPIRE_S)

    async def _done(self, backup: str) -> WorkState | None:
        found = await self._parts.threads.run(self._parts.directory.notes.complete, backup)
        if found is None:
            return None
        size = found.size_bytes
        return WorkState(state="done", done_bytes=size, total_bytes=size, message=_said(found))

    async def _done_or_refused(self, want: BackupWork) -> WorkState | None:
        """Return the result; refuse a late request if the files belong to another attempt."""
        found = await self._done(want.id)
        if found is None and want.live and await self._parts.threads.run(self._is_of_other, want):
            raise _lost(want)
        return found

    def _is_of_other(self, want: BackupWork) -> bool:
        """Return True if the files belong to another attempt. Runs in a disk thread."""
        try:
            draft = self._parts.directory.draft(want.id)
        except VirtbusError:
            return False
        return draft is not None and draft.attempt != want.attempt

    def _drop(self, want: BackupWork) -> None:
        """Remove a failed attempt's files; another attempt's files stay. Runs in a disk thread."""
        if not self._is_of_other(want):
            self._parts.directory.drop(want.id)

    # --- a VM that is off ---------------------------------------------------------------------
    async def _copy_all(self, want: BackupWork, job: Job) -> None:
        refs = [disk.ref for disk in want.disks if disk.ref is not None]
        job.step = STAGE
        async with self._jobs.slots, self._parts.locks.held(want.uid, *refs):
            if not want.may_begin:
                message = f"{want.name} was started before its disks were copied; repeat"
                raise VirtbusError(Code.CONFLICT, "disk_in_use", message)
            await self._made(want, job, self._copy_disk)

    async def _made(self, want: BackupWork, job: Job, write: Write) -> None:
        threads, files = self._parts.threads, self._parts.directory
        published = False
        try:
            if not want.live:
                await threads.run(self._begin, want)
            draft = await threads.run(files.draft, want.id)
            if draft is None or draft.attempt != want.attempt:
                raise _lost(want)
            job.step = STORE if want.live else PUSH
            since = bitmap_name(draft.parent) if draft.parent else ""
            disks = [await write(want, disk, job, since) for disk in draft.disks]
            if await threads.run(files.draft, want.id) != draft:
                raise _lost(want)  # the files were staged again meanwhile
            remark = want.remark[:MAX_TEXT]
            more: dict[str, object] = {"disks": tuple(disks), "remark": remark, "attempt": ""}
            if want.live:
                more |= {"created_ns": want.at_ns, "bitmap": bitmap_name(want.id)}
            job.step, job.final = PUBLISH, True
            await threads.run(files.publish, draft.model_copy(update=more))
            published = True
        finally:
            job.final = job.final and published
            if published:
                await threads.run(files.staging.remove, want.id)
            else:
                await threads.run(self._drop, want)
        log.info("backup %s stored", want.id, extra={"code": "backup_stored", "uid": want.uid})

    async def _copy_disk(
        self, want: BackupWork, disk: BackupDisk, job: Job, since: str
    ) -> BackupDisk:
        threads = self._parts.threads
        ref = next(one.ref for one in want.disks if one.name == disk.name)
        async with AsyncExitStack() as opened:
            place = await threads.run(self._parts.places.of, want.uid, disk.name, ref)
            source = opened.enter_context(await threads.run(place.opened))
            done_bytes = job.done_bytes
            expected_bytes = 0 if since else source.used_bytes  # an increment's size is unknown
            job.total_bytes += expected_bytes
            await self._check_room(expected_bytes)
            size_bytes = disk.virtual_size_bytes if since else 0
            new_disk = self._parts.directory.new_disk
            target = await threads.run(new_disk, want.id, disk.name, size_bytes)
            opened.push_async_callback(threads.run, target.close)

            async def look() -> None:
                await self._check_room(0)
                used = await threads.run(lambda: target.written_bytes)
                job.done_bytes = done_bytes + used
                if job.total_bytes:
                    job.done_bytes = min(job.done_bytes, job.total_bytes)

            into, limits = target.descriptor, self._parts.limits
            if since:
                await self._push(source, into, since, limits, look)
            else:
                await self._convert(source, into, ExportFormat.QCOW2, limits, look)
            read = Digester(into)
            while await threads.run(read.step):
                pass
            await threads.run(freeze, into)
        return _described(disk, read)

    # --- a running guest ----------------------------------------------------------------------
    async def _stage(self, want: BackupWork) -> WorkState:
        """Stage files for QEMU, once for each attempt: a repeat must not replace files in use.

        An agent that has restarted begins another attempt, with a new bitmap in the guest's QEMU.
        The files of the earlier attempt are older than the new bitmap, so they are replaced.
        """
        if want.attempt and (known := self._stagings.get(want.attempt)) is not None:
            return known
        if (late := await self._jobs.end(want.id) or await self._done(want.id)) is not None:
            return late
        parent = await self._parts.threads.run(self._staged, want)
        state = WorkState(state="working", step=PUSH, parent=parent)
        self._stagings[want.attempt] = state
        return state

    def _staged(self, want: BackupWork) -> str:
        """Stage files for QEMU in place of earlier files; return the parent's bitmap, or ""."""
        files = self._parts.directory
        files.drop(want.id)
        draft = self._begin(want)
        places = [self._parts.places.of(want.uid, one.name, one.ref) for one in want.disks]
        full_bytes = 0 if draft.parent else sum(place.used_bytes for place in places)
        self._parts.staged.check_room(full_bytes)
        files.staging.make(want.id, draft.disks)
        return bitmap_name(draft.parent) if draft.parent else ""

    async def _store(self, want: BackupWork, job: Job) -> None:
        async with self._jobs.slots:
            await self._made(want, job, self._store_disk)

    async def _store_disk(self, want: BackupWork, disk: BackupDisk, job: Job, _: str) -> BackupDisk:
        threads, files = self._parts.threads, self._parts.directory
        async with AsyncExitStack() as opened:
            source = await threads.run(files.staging.opened, want.id, disk.name)
            opened.callback(source.close)
            await threads.run(check_file, source.descriptor, disk)
            size_bytes = await threads.run(lambda: source.size_bytes)
            job.total_bytes += size_bytes
            await self._check_room(size_bytes)
            target = await threads.run(files.new_disk, want.id, disk.name)
            opened.push_async_callback(threads.run, target.close)
            read = Digester(source.descriptor, target.descriptor)
            while done := await threads.run(read.step):
                job.done_bytes += done
                if read.done_bytes > size_bytes:
                    break
                await self._check_room(0)
            if read.done_bytes != size_bytes:
                message = f"the file of the disk {disk.name} was written while it was stored"
                raise VirtbusError(Code.CONFLICT, "disk_damaged", message)
            await threads.run(freeze, target.descriptor)
        return _described(disk, read)

    async def _check_room(self, more_bytes: int) -> None:
        if self._parts.stored is not None:
            await self._parts.threads.run(self._parts.stored.check_room, more_bytes)

    # --- the parent, in a disk thread ---------------------------------------------------------
    def _begin(self, want: BackupWork) -> BackupManifest:
        """Make the folder `.part-<id>` of a backup with a draft of its manifest; return the draft.

        Raises:
            VirtbusError: 409 `no_parent`: an increment was requested, and is not possible.
        """
        disks = tuple(self._disk_now(want, one) for one in want.disks)
        parent, why = parent_of(self._parts.directory, want, disks, self._bitmaps(want))
        if parent is not None and not want.live and (lacks := missing()):
            parent, why = None, lacks
        if parent is None and want.mode is BackupMode.INCREMENTAL:
            message = f"no increment is possible: {why}; leave --incremental out for a full backup"
            raise VirtbusError(Code.CONFLICT, "no_parent", message)
        names = {"id", "uid", "namespace", "name", "node", "owner", "schedule", "spec", "attempt"}
        more = {} if parent is None else {"parent": parent.id, "depth": parent.depth + 1}
        more["number"] = self._parts.directory.next_number()
        now_ns = self._parts.sources.time_ns()
        fields = {"created_ns": now_ns, "full_because": why[:MAX_TEXT], "disks": disks, **more}
        draft = BackupManifest.model_validate(want.model_dump(include=names) | fields)
        self._parts.directory.begin(draft)
        return draft

    def _bitmaps(self, want: BackupWork) -> frozenset[str]:
        """Return the usable bitmaps that all disks have.

        For a running guest, the request names these bitmaps. For a VM that is off, they are read
        from the disks.
        """
        if want.live or want.mode is BackupMode.FULL:
            return frozenset(want.bitmaps or ())
        places = (self._parts.places.of(want.uid, one.name, one.ref) for one in want.disks)
        found = [place.bitmaps() for place in places]
        return frozenset.intersection(*found) if found else frozenset()

    def _disk_now(self, want: BackupWork, disk: BackedDisk) -> BackupDisk:
        place = self._parts.places.of(want.uid, disk.name, disk.ref)
        size = disk.size_bytes or place.overlay.virtual_size_bytes
        fields = {"name": disk.name, "virtual_size_bytes": size, "below": place.below}
        volume = {} if disk.ref is None else {"volume_uid": disk.ref.uid}
        return BackupDisk.model_validate(fields | volume)


def _described(disk: BackupDisk, read: Digester) -> BackupDisk:
    return disk.model_copy(update={"size_bytes": read.done_bytes, "digest": read.digest})


def _said(made: BackupManifest) -> str:
    kind = f"full: {made.full_because}" if not made.parent else f"increment on {made.parent}"
    return f"{kind}; {made.remark}" if made.remark else kind


def _lost(want: BackupWork) -> VirtbusError:
    message = f"the files of the backup of {want.name} are gone; repeat the backup"
    return VirtbusError(Code.CONFLICT, "backup_lost", message)
