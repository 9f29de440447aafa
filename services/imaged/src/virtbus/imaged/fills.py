"""Fills volumes with copies of images and disks; each request may be repeated (ADR 0053).

The final step is the rename of the finished copy, or on a device the mark of complete content. A
crash before the final step leaves a part, which the next attempt replaces. After the final step
the volume has its disk, and every request finds the disk.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial

from virtbus.imaged.backup_checks import BackupChecks
from virtbus.imaged.core.disk_requests import fill_size, image_of_fill
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.disks import Disks
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, OpenedSource, convert
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.volume_files import DISK
from virtbus.imaged.exports import Converter
from virtbus.imaged.images import Images
from virtbus.imaged.single_flight import Asker
from virtbus.imaged.snapshot_parts import snapshot_lock
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.node_rpc import FillWork, WorkState
from virtbus.schemas.operation import STEPS, ExportFormat
from virtbus.schemas.pool import LOCAL, ON_DEVICES, PoolKind
from virtbus.schemas.volume_ref import FillSource, VolumeRef

log = logging.getLogger(__name__)

FETCH, COPY, PUBLISH = (step.name for step in STEPS["fill"])
_REMOVALS = {PoolKind.BLOCK: "clear its device", PoolKind.LVM: "remove its logical volume"}
INTO_EXISTING = ("-n", "--target-is-zero")
"""Options of qemu-img: the target is an empty disk that exists, maybe larger than the source."""


@dataclass(frozen=True, slots=True)
class FillParts:
    """The parts of imaged that fills use."""

    disks: Disks
    images: Images
    store: ImageStore
    places: DiskPlaces
    pools: Pools
    threads: DiskThreads
    limits: TransferLimits
    backups: BackupChecks | None = None


class Fills:
    """The copies into volumes of a node.

    A copy locks the volume, and the VM or volume whose disk is copied.
    """

    def __init__(
        self,
        jobs: DiskJobs,
        parts: FillParts,
        filled: Callable[[], None],
        converter: Converter = convert,
    ) -> None:
        """`filled` is called after each fill, because VMs may wait for the volume."""
        self._jobs = jobs
        self._parts = parts
        self._filled = filled
        self._convert = converter

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: FillWork) -> WorkState:
        """Ensure or cancel a fill; see `FillWork`.

        Raises:
            VirtbusError: the failure of the attempt before this request. The next request begins
                another attempt. 400 `disk_too_large`, `disk_too_small`. 409 `disk_in_use`,
                `released`, `volume_exists`. 422 `copy_failed`, `sandbox_unavailable`,
                `backups_off`. 503 `disk_full`, `store_error`. The errors of `Images.ensure`,
                `Pools.of`, `DiskPlaces`, `DiskPlace.opened`, `BackupChecks` and `DeviceVolumes`.
        """
        if want.do == "cancel":
            await self._jobs.end(want.id)
            state = await self._state(want)
            if state is None and want.ref.kind not in ON_DEVICES:  # only a release clears a device
                async with self._parts.disks.locks.of(want.ref.folder):
                    folders = await self._parts.threads.run(self._parts.pools.of, want.ref)
                    await self._parts.threads.run(folders.drop_copy, want.ref.folder)
            return state or WorkState(state="none")
        done, work = partial(self._state, want), partial(self._run, want)
        return await self._jobs.ensure(want.id, want.ref.uid, done, work)

    async def _state(self, want: FillWork) -> WorkState | None:
        """Return `done` if the volume has content, otherwise None.

        For a move, content counts only if the move itself wrote it. Other content raises 409
        `volume_exists`; a cancel of the move returns `none` instead.
        """
        ref, threads = want.ref, self._parts.threads
        if ref.kind in ON_DEVICES:
            mark = await self._parts.disks.devices.filled(ref)
            if mark is None:
                return None
            size_bytes, by = mark.size_bytes, mark.operation
        else:
            folders = await threads.run(self._parts.pools.of, ref)
            found = await threads.run(folders.read, ref.folder, DISK)
            if found is None:
                return None
            by = await threads.run(folders.filled_by, ref.folder) if want.source.moved else ""
            size_bytes = found.virtual_size_bytes
        if want.source.moved and by != want.id:
            if want.do == "cancel":
                return WorkState(state="none")
            raise _exists(ref)
        return WorkState(state="done", virtual_size_bytes=size_bytes)

    # --- the job ----------------------------------------------------------------------------
    async def _run(self, want: FillWork, job: Job) -> None:
        source, locks = want.source, self._parts.disks.locks
        with ExitStack() as leases:
            image = None
            if source.image:
                image = await self._fetched(want, job)
                leases.enter_context(self._parts.store.lease(image.digest))
            volumes = (want.ref,) if source.volume is None else (want.ref, source.volume)
            async with self._slots(source), AsyncExitStack() as held:
                await held.enter_async_context(locks.held(source.vm or want.ref.uid, *volumes))
                # A copy lends the files to the sandbox's user, then takes them back. So only one
                # copy of a snapshot runs at a time.
                if source.snapshot is not None:
                    lock = f"copy of {snapshot_lock(source.snapshot)}"
                    await held.enter_async_context(locks.of(lock))
                if not source.moved:  # a volume may return to a node that it has left
                    self._parts.disks.refuse_released(want.ref)
                if await self._state(want) is None:
                    on_device = want.ref.kind in ON_DEVICES
                    await (self._fill_device if on_device else self._fill)(want, job, image)
        log.info("filled %s", want.ref.name, extra={"code": "filled", "uid": want.ref.uid})
        self._filled()

    def _slots(self, source: FillSource) -> asyncio.Semaphore:
        backups = self._parts.backups
        return backups.slots if source.backup and backups is not None else self._jobs.slots

    async def _fetched(self, want: FillWork, job: Job) -> ImageInfo:
        async def moved(done_bytes: int, total_bytes: int | None) -> None:
            job.done_bytes, job.total_bytes = done_bytes, total_bytes or 0

        job.step = FETCH
        source, policy = image_of_fill(want.source)
        asker = Asker(moved, want.ref.uid, want.ref.namespace)
        return await self._parts.images.ensure(source, asker, policy)

    async def _fill(self, want: FillWork, job: Job, image: ImageInfo | None) -> None:
        threads, pools, ref = self._parts.threads, self._parts.pools, want.ref
        volumes = await threads.run(pools.of, ref)
        published = False
        async with self._open(want.source, image, job) as source:
            await self._verify(want.source, source, job)
            size_bytes = self._size(want, source.virtual_size_bytes)
            job.step, job.done_bytes, job.total_bytes = COPY, 0, source.used_bytes
            await threads.run(pools.check_room, ref, size_bytes, job.total_bytes)
            try:
                part = await threads.run(volumes.begin_copy, ref, size_bytes, want.id)
                with closing(part):

                    async def look() -> None:
                        await threads.run(pools.check_room, ref, 0)
                        done_bytes = await threads.run(lambda: part.written_bytes)
                        job.done_bytes = min(done_bytes, job.total_bytes)

                    await self._convert(
                        source,
                        part.descriptor,
                        ExportFormat.QCOW2,
                        self._parts.limits,
                        look,
                        INTO_EXISTING,
                    )
                    job.step = PUBLISH
                    await threads.run(volumes.publish_copy, ref.folder, part, size_bytes)
                    published = True
            finally:
                if not published:
                    await threads.run(volumes.drop_copy, ref.folder)

    async def _fill_device(self, want: FillWork, job: Job, image: ImageInfo | None) -> None:
        threads, limits, ref = self._parts.threads, self._parts.limits, want.ref
        devices = self._parts.disks.devices
        job.step = COPY
        if want.source == FillSource():
            await devices.fill(ref, self._size(want, 0), None, limits, job, want.id)
            return
        async with self._open(want.source, image, job) as source:
            await self._verify(want.source, source, job)
            size_bytes = self._size(want, source.virtual_size_bytes)
            on_disk = ref.model_copy(update={"pool": LOCAL})  # the raw copy is in this pool
            await threads.run(self._parts.pools.check_room, on_disk, 0, source.used_bytes)
            await devices.fill(ref, size_bytes, source, limits, job, want.id)

    def _size(self, want: FillWork, there: int) -> int:
        """Return the size of the volume, whose source has `there` bytes; raises as `fill_size`."""
        ref = want.ref
        if want.source.moved:  # the record may not know the volume's size
            ref = ref.model_copy(update={"size_bytes": max(ref.size_bytes, there)})
        return fill_size(ref, there, self._parts.limits.max_virtual_bytes)

    @asynccontextmanager
    async def _open(
        self, source: FillSource, image: ImageInfo | None, job: Job
    ) -> AsyncIterator[ExportSource]:
        """Open the source; errors as `_opened` and `DeviceVolumes.opened`.

        Only the opening needs the snapshot's lock: an open file keeps its data when its name is
        removed. So linked clones of the snapshot, and its removal, do not wait for the copy.
        """
        if source.volume is not None and source.volume.kind in ON_DEVICES:
            on_disk = source.volume.model_copy(update={"pool": LOCAL})
            room = partial(self._parts.threads.run, self._parts.pools.check_room, on_disk, 0)
            async with self._parts.disks.devices.opened(source.volume, job, room) as device:
                yield device
            return
        async with AsyncExitStack() as held:
            if source.snapshot is not None:
                lock = self._parts.disks.locks.of(snapshot_lock(source.snapshot))
                await held.enter_async_context(lock)
            opened = await self._opened(source, image)
        with opened as found:
            yield found

    async def _verify(self, source: FillSource, opened: ExportSource, job: Job) -> None:
        """Read an opened disk of a backup before its use; errors as `BackupChecks.read_all`."""
        if source.backup and self._parts.backups is not None:
            job.step = FETCH
            await self._parts.backups.read_all(opened, source.backup, source.disk, job)
            job.step = COPY

    async def _opened(self, source: FillSource, image: ImageInfo | None) -> OpenedSource:
        """Open the source; errors as `DiskPlaces.of`, `DiskPlace.opened`, `BackupChecks.opened`."""
        if source.backup:
            if self._parts.backups is None:
                message = "this node has no directory for backups"
                raise VirtbusError(Code.UNSUPPORTED, "backups_off", message)
            return await self._parts.backups.opened(source.backup, source.disk)
        if image is not None:
            path, size_bytes = self._parts.store.path(image.digest), image.virtual_size_bytes
            opened = partial(OpenedSource, path, None, size_bytes, "", image.format)
            return await self._parts.threads.run(opened)
        return await self._parts.threads.run(self._opened_here, source)

    def _opened_here(self, source: FillSource) -> OpenedSource:
        places = self._parts.places
        if source.snapshot is not None:
            return places.of_snapshot(source.snapshot, source.disk).opened()
        return places.of(source.vm or "", source.disk, source.volume).opened()


def _exists(ref: VolumeRef) -> VirtbusError:
    step = _REMOVALS.get(ref.kind, "remove its folder in disks/volumes")
    message = (
        f"this node has data of {ref.name} of an earlier time; compare it with the present data, "
        f"then {step}"
    )
    return VirtbusError(Code.CONFLICT, "volume_exists", message)
