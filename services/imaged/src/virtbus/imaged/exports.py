"""Exports disks to files, one job for each operation; each request may be repeated (ADR 0048)."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, OpenedSource, convert
from virtbus.imaged.edge.export_files import PACKED, PART, ExportFiles
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.volume_files import DISK, VolumeFolders
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.node_rpc import ExportState, ExportWork
from virtbus.schemas.operation import STEPS, ExportFormat, ExportResult

log = logging.getLogger(__name__)

EXPORTS_AT_ONCE = 2
"""Conversions at a time: each takes one CPU and the disk's bandwidth."""
KEEP_S = 25 * 3600.0
"""Age at which exports are removed. An operation and its file are removed after a day. So this
removes only the files of operations whose removal the node did not see."""
EXPIRE_S = 600.0
CONVERT, PACK, PUBLISH = (step.name for step in STEPS["export"])


class Converter(Protocol):
    """Writes an opened disk to a descriptor; `edge.export_conversion.convert`."""

    async def __call__(
        self,
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
    ) -> None: ...


@dataclass
class _Job:
    """The work on one export; `error` is its failure, which the next request gets."""

    step: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    error: VirtbusError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ExportParts:
    """The parts of imaged that exports use."""

    locks: DiskLocks
    store: ImageStore
    files: DiskFolders
    exports: ExportFiles
    threads: DiskThreads
    limits: TransferLimits


class Exports:
    """The exports of a node. While a disk is exported, nothing makes, grows or removes it."""

    def __init__(
        self, group: asyncio.TaskGroup, parts: ExportParts, converter: Converter = convert
    ) -> None:
        self._group = group
        self._parts = parts
        self._volumes = VolumeFolders(parts.files.root)
        self._convert = converter
        self._jobs: dict[str, _Job] = {}
        self._slots = asyncio.Semaphore(EXPORTS_AT_ONCE)

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: ExportWork) -> ExportState:
        """Ensure, cancel or remove an export; see `ExportWork`.

        Raises:
            VirtbusError: the failure of the attempt before this request; the next request begins
                another. 404 `disk_missing`; 409 `disk_in_use`, `disk_damaged`, `disk_mismatch`,
                `disk_unreadable`; 422 `export_failed`, `sandbox_unavailable`; 503 `disk_full`,
                `store_error`.
        """
        if want.do == "ensure":
            return await self._ensure(want)
        job = self._jobs.pop(want.id, None)
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
        found = await self._published(want.id)
        if found is not None and want.do == "cancel":
            return ExportState(state="done", result=found)
        await self._parts.threads.run(self._parts.exports.remove, want.id)
        return ExportState(state="none")

    async def _ensure(self, want: ExportWork) -> ExportState:
        job = self._jobs.get(want.id)
        if job is None and (found := await self._published(want.id)) is not None:
            return ExportState(state="done", result=found)
        job = self._jobs.get(want.id)
        if job is None:
            job = self._jobs[want.id] = _Job()
            job.task = self._group.create_task(self._run(want, job))
        elif job.error is not None:
            del self._jobs[want.id]
            raise job.error
        return ExportState(
            state="working",
            step=job.step,
            done_bytes=job.done_bytes,
            total_bytes=job.total_bytes,
        )

    async def _published(self, export: str) -> ExportResult | None:
        return await self._parts.threads.run(self._parts.exports.published, export)

    async def expire_forever(self) -> None:
        """Remove old exports now and then; never returns."""
        while True:
            try:
                old = await self._parts.threads.run(
                    self._parts.exports.expire, KEEP_S, frozenset(self._jobs)
                )
            except (OSError, VirtbusError) as error:
                log.warning("old exports remain: %s", error, extra={"code": "store_error"})
            else:
                for export in old:
                    log.info("export %s removed: old", export, extra={"code": "export_removed"})
            await asyncio.sleep(EXPIRE_S)

    # --- the job ----------------------------------------------------------------------------
    async def _run(self, want: ExportWork, job: _Job) -> None:
        volumes = () if want.ref is None else (want.ref,)
        try:
            async with self._slots, self._parts.locks.held(want.uid, *volumes):
                await self._export(want, job)
        except VirtbusError as error:
            job.error = error
            extra = {"code": error.reason, "uid": want.uid}
            log.warning("export %s failed: %s", want.id, error, extra=extra)
        except Exception:  # boundary: one export's fault must not end the service
            log.exception("an export failed", extra={"code": "internal", "uid": want.uid})
            job.error = VirtbusError(Code.INTERNAL, "internal", "it failed; see imaged's log")
        else:
            self._jobs.pop(want.id, None)
            log.info("exported %s", want.id, extra={"code": "exported", "uid": want.uid})

    async def _export(self, want: ExportWork, job: _Job) -> None:
        threads, files = self._parts.threads, self._parts.exports
        name, published = PART, False
        with ExitStack() as stack:
            try:
                part = await threads.run(files.begin, want.id)
                stack.callback(part.close)
                await self._write(want, job, part)
                if want.format is ExportFormat.RAW_GZ:
                    job.step, name, whole = PACK, PACKED, part
                    part = await threads.run(files.begin_packed, want.id)
                    stack.callback(part.close)
                    await self._pack(whole, part)
                result = await self._described(want, part)
                job.step = PUBLISH
                await threads.run(files.publish, want.id, name, part, result)
                published = True
            finally:
                if not published and await self._published(want.id) is None:
                    await threads.run(files.remove, want.id)

    async def _write(self, want: ExportWork, job: _Job, part: ExportPart) -> None:
        threads, files = self._parts.threads, self._parts.exports
        job.step = CONVERT
        with await threads.run(self._opened, want) as source:
            job.total_bytes = source.used_bytes
            await threads.run(files.check_room, job.total_bytes)

            async def look() -> None:
                await threads.run(files.check_room, 0)
                job.done_bytes = min(await threads.run(lambda: part.written_bytes), job.total_bytes)

            await self._convert(source, part.descriptor, want.format, self._parts.limits, look)

    async def _pack(self, whole: ExportPart, into: ExportPart) -> None:
        """Write gzip of one part to another."""
        threads, at = self._parts.threads, 0
        with into.packed() as packed:
            while data := await threads.run(whole.read, at):
                await threads.run(packed.write, data)
                await threads.run(self._parts.exports.check_room, 0)
                at += len(data)

    async def _described(self, want: ExportWork, part: ExportPart) -> ExportResult:
        digest, at = hashlib.sha256(), 0
        while data := await self._parts.threads.run(part.read, at):
            await self._parts.threads.run(digest.update, data)
            at += len(data)
        return ExportResult(
            path=str(self._parts.exports.path(want.id, want.format)),
            size_bytes=at,
            digest=f"sha256:{digest.hexdigest()}",
        )

    # --- in a disk thread -------------------------------------------------------------------
    def _opened(self, want: ExportWork) -> OpenedSource:
        """Open the disk and its image; errors as `do`. The disk keeps its image in the store."""
        files: DiskFolders = self._parts.files if want.ref is None else self._volumes
        folder, name = (want.uid, want.disk or "") if want.ref is None else (want.ref.folder, DISK)
        found = files.read(folder, name)
        if found is None:
            message = "the disk does not exist on this node; a first start of its VM makes it"
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", message)
        image = Path(found.backing_path) if found.backing_path else None
        if image is not None and (
            image.parent != self._parts.store.data_dir
            or found.backing_format not in set(ImageFormat)
        ):
            message = "the disk rests on a file outside the image store; it is not read"
            raise VirtbusError(Code.CONFLICT, "disk_mismatch", message)
        path = files.path(folder, name)
        return OpenedSource(path, image, found.virtual_size_bytes, found.backing_format)
