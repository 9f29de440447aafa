"""Exports disks to files; each request may be repeated (ADR 0048)."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.imaged.core.download_requests import path
from virtbus.imaged.core.limits import DownloadLimits, TransferLimits
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, convert
from virtbus.imaged.edge.export_files import PACKED, PART, ExportFiles
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.export_link import ExportLink, ExportLinkAsk
from virtbus.schemas.node_rpc import ExportWork, WorkState
from virtbus.schemas.operation import STEPS, ExportFormat, ExportResult
from virtbus.schemas.pool import ON_DEVICES

log = logging.getLogger(__name__)

KEEP_S = 25 * 3600.0
"""Age at which exports are removed. The removal of an operation, after a day, also removes its
file. This limit is for exports whose node did not see the removal of the operation."""
EXPIRE_S = 600.0
CONVERT, PACK, PUBLISH = (step.name for step in STEPS["export"])


class Converter(Protocol):
    """Writes an opened disk to a descriptor, as `edge.export_conversion.convert` does."""

    async def __call__(
        self,
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
        into: tuple[str, ...] = (),
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ExportParts:
    """The parts of imaged that exports use."""

    locks: DiskLocks
    places: DiskPlaces
    exports: ExportFiles
    threads: DiskThreads
    limits: TransferLimits
    devices: DeviceVolumes
    downloads: DownloadLimits | None = None
    """None if this node serves no downloads."""
    sources: Sources = REAL


class Exports:
    """The exports of a node. While a disk is exported, nothing makes, grows or removes it."""

    def __init__(self, jobs: DiskJobs, parts: ExportParts, converter: Converter = convert) -> None:
        self._jobs = jobs
        self._parts = parts
        self._convert = converter
        self._linking = asyncio.Lock()

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: ExportWork) -> WorkState:
        """Ensure, cancel or remove an export; see `ExportWork`.

        Raises:
            VirtbusError: the failure of the attempt before this request. The next request begins
                another attempt. 404 `disk_missing`. 409 `disk_in_use`, `disk_damaged`,
                `disk_mismatch`, `disk_unreadable`. 422 `copy_failed`, `sandbox_unavailable`. 503
                `disk_full`, `store_error`. The errors of `_opened`.
        """
        if want.do == "ensure":
            done, work = partial(self._done, want.id), partial(self._run, want)
            return await self._jobs.ensure(want.id, want.uid, done, work)
        await self._jobs.end(want.id)
        found = await self._published(want.id)
        if found is not None and want.do == "cancel":
            return WorkState(state="done", result=found)
        await self._parts.threads.run(self._parts.exports.remove, want.id)
        return WorkState(state="none")

    async def _done(self, export: str) -> WorkState | None:
        found = await self._published(export)
        return None if found is None else WorkState(state="done", result=found)

    async def _published(self, export: str) -> ExportResult | None:
        return await self._parts.threads.run(self._parts.exports.published, export)

    async def link(self, want: ExportLinkAsk) -> ExportLink:
        """Return a link to the file of an export.

        Raises:
            VirtbusError: 404 `export_not_here`. 422 `downloads_off`. 503 `store_error`.
        """
        if self._parts.downloads is None:
            message = "this node serves no downloads: set download_address in its imaged.toml"
            raise VirtbusError(Code.UNSUPPORTED, "downloads_off", message)
        async with self._linking:
            result = await self._published(want.id)
            if result is None:
                message = f"this node has no file of export {want.id}; `virtbus operation get`"
                raise VirtbusError(Code.NOT_FOUND, "export_not_here", f"{message} shows its state")
            files = self._parts.exports
            new = self._parts.sources.secret(32)
            key = await self._parts.threads.run(files.link_key, want.id, new)
        now_s = self._parts.sources.time_ns() // 10**9
        expires, name = now_s + want.valid_s, Path(result.path).name
        return ExportLink(
            url=self._parts.downloads.url + path(key, want.id, name, expires),
            expires_ns=expires * 10**9,
            size_bytes=result.size_bytes,
            digest=result.digest,
        )

    async def expire_forever(self) -> None:
        while True:
            try:
                old = await self._parts.threads.run(
                    self._parts.exports.expire, KEEP_S, self._jobs.ids
                )
            except (OSError, VirtbusError) as error:
                log.warning("old exports remain: %s", error, extra={"code": "store_error"})
            else:
                for export in old:
                    log.info("export %s removed: old", export, extra={"code": "export_removed"})
            await asyncio.sleep(EXPIRE_S)

    # --- the job ----------------------------------------------------------------------------
    async def _run(self, want: ExportWork, job: Job) -> None:
        volumes = () if want.ref is None else (want.ref,)
        async with self._jobs.slots, self._parts.locks.held(want.uid, *volumes):
            await self._export(want, job)
        log.info("exported %s", want.id, extra={"code": "exported", "uid": want.uid})

    async def _export(self, want: ExportWork, job: Job) -> None:
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

    async def _write(self, want: ExportWork, job: Job, part: ExportPart) -> None:
        threads, files = self._parts.threads, self._parts.exports
        job.step = CONVERT
        async with self._opened(want, job) as source:
            job.total_bytes = source.used_bytes
            await threads.run(files.space.check_room, job.total_bytes)

            async def look() -> None:
                await threads.run(files.space.check_room, 0)
                job.done_bytes = min(await threads.run(lambda: part.written_bytes), job.total_bytes)

            await self._convert(source, part.descriptor, want.format, self._parts.limits, look)

    async def _pack(self, whole: ExportPart, into: ExportPart) -> None:
        threads, at = self._parts.threads, 0
        with into.packed() as packed:
            while data := await threads.run(whole.read, at):
                await threads.run(packed.write, data)
                await threads.run(self._parts.exports.space.check_room, 0)
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

    @asynccontextmanager
    async def _opened(self, want: ExportWork, job: Job) -> AsyncIterator[ExportSource]:
        """Open the disk, its layers and its image.

        Raises:
            VirtbusError: the errors of `DiskPlaces.of`, `DiskPlace.opened` and
                `DeviceVolumes.opened`.
        """
        threads, ref = self._parts.threads, want.ref
        if ref is not None and ref.kind in ON_DEVICES:
            room = partial(threads.run, self._parts.exports.space.check_room)
            async with self._parts.devices.opened(ref, job, room) as device:
                yield device
            return
        place = await threads.run(self._parts.places.of, want.uid, want.disk or "", ref)
        with await threads.run(place.opened) as source:
            yield source
