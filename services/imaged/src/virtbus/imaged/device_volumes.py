"""Fills, reads and releases volumes on devices; steps can be repeated after a crash (ADR 0060)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from virtbus.imaged.core.device_marks import DeviceMark
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.disk_jobs import Job
from virtbus.imaged.edge.device_io import raw_file
from virtbus.imaged.edge.devices import ZERO_BYTES, Devices
from virtbus.imaged.edge.disk_copy import used_bytes
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, convert
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import ExportFormat
from virtbus.schemas.volume_ref import VolumeRef

RELEASE_S = 5.0
"""Time that a release works for one request. The next request continues the release."""
Look = Callable[[], Awaitable[None]]


class DeviceVolumes:
    """The volumes on devices. A caller holds the lock of the volume."""

    def __init__(self, devices: Devices, threads: DiskThreads, folder: Path) -> None:
        """`folder` is for raw copies: files without a name, so that a crash leaves none."""
        self._devices = devices
        self._threads = threads
        self._folder = folder
        self._wiped: dict[tuple[str, str], int] = {}
        """By pool and folder of a volume: the bytes that the release of its device has cleared. A
        volume that moves between pools has two devices."""

    async def filled(self, ref: VolumeRef) -> DeviceMark | None:
        return await self._threads.run(self._devices.filled, ref)

    async def has_other(self, ref: VolumeRef, operation: str) -> bool:
        mark = await self.filled(ref)
        return mark is not None and mark.operation != operation

    @asynccontextmanager
    async def opened(
        self, ref: VolumeRef, job: Job, check_room: Callable[[int], Awaitable[None]]
    ) -> AsyncIterator[ExportSource]:
        """Copy the content to a raw file without a name, and yield this file.

        The copy is for QEMU's programs, which run in a sandbox without devices. `check_room` raises
        an error if the node's disk has no room for the given number of bytes.

        Raises:
            VirtbusError: 409 `volume_empty`: the device does not have complete content. The errors
                of `check_room` and `Devices.opened`.
        """
        mark = await self.filled(ref)
        if mark is None:
            message = f"the device of the volume {ref.name} does not have its content"
            raise VirtbusError(Code.CONFLICT, "volume_empty", message)
        size_bytes = job.total_bytes = mark.size_bytes
        with raw_file(self._folder) as raw:
            for at in range(0, size_bytes, ZERO_BYTES):
                await check_room(0)
                count = min(ZERO_BYTES, size_bytes - at)
                await self._threads.run(self._devices.read_into, ref, raw, at, count)
                job.done_bytes = at + count
            used = await self._threads.run(used_bytes, raw)
            yield ExportSource(raw, size_bytes, disk_format="raw", used_bytes=used)

    async def fill(
        self,
        ref: VolumeRef,
        size_bytes: int,
        source: ExportSource | None,
        limits: TransferLimits,
        job: Job,
        operation: str = "",
    ) -> None:
        """Write the content: zeroes, then the source. The mark of complete content is written last.

        Raises:
            VirtbusError: the errors of `Devices.begin`, `Devices.finish` and `convert`.
        """
        self._wiped.pop((ref.pool, ref.folder), None)
        room_bytes = await self._threads.run(self._devices.begin, ref, size_bytes)
        job.done_bytes, job.total_bytes = 0, room_bytes
        for at in range(0, room_bytes, ZERO_BYTES):
            count = min(ZERO_BYTES, room_bytes - at)
            await self._threads.run(self._devices.zero, ref, at, count)
            job.done_bytes = at + count

        async def look() -> None:
            """Check nothing, because the sandbox limits the size of the copy."""

        with raw_file(self._folder) as raw:
            if source is not None:
                await convert(source, raw, ExportFormat.RAW, limits, look)
            copy = raw if source is not None else None
            await self._threads.run(self._devices.finish, ref, copy, size_bytes, operation)

    async def release(self, ref: VolumeRef) -> bool:
        """Clear the device and its marks; return False if the device is not the volume's.

        Raises:
            VirtbusError: 503 `volume_wiping`: the device is not cleared yet; the caller must repeat
                the call. The errors of `Devices.opened`.
        """
        loop = asyncio.get_running_loop()
        until_s, of = loop.time() + RELEASE_S, (ref.pool, ref.folder)
        room_bytes = await self._threads.run(self._devices.begin_release, ref)
        if room_bytes is None:
            self._wiped.pop(of, None)
            return False
        while (at := self._wiped.get(of, 0)) < room_bytes:
            if loop.time() > until_s:
                message = f"the device of {ref.name} is being cleared: {at} of {room_bytes} bytes"
                raise VirtbusError(Code.UNAVAILABLE, "volume_wiping", message, after_ms=500)
            count = min(ZERO_BYTES, room_bytes - at)
            await self._threads.run(self._devices.zero, ref, at, count)
            self._wiped[of] = at + count
        await self._threads.run(self._devices.end_release, ref)
        self._wiped.pop(of, None)
        return True
