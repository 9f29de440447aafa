"""Converts images of other formats to qcow2, by qemu-img in a sandbox (ADR 0041)."""

import signal
from collections.abc import Callable

from virtbus.imaged.core.foreign import Foreign
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.sources import shown
from virtbus.imaged.edge import qemu_img
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.local_files import too_large
from virtbus.imaged.edge.partial_download import PartialDownload, disk_full
from virtbus.schemas.errors import Code, VirtbusError


class Conversions:
    """Converts downloaded files of the store, within the limits of a transfer."""

    def __init__(
        self,
        limits: TransferLimits,
        threads: DiskThreads,
        command: tuple[str, ...] = qemu_img.COMMAND,
    ) -> None:
        self._limits = limits
        self._threads = threads
        self._command = command

    async def convert(
        self,
        url: str,
        foreign: Foreign,
        parts: tuple[PartialDownload, PartialDownload],
        worked: Callable[[int], None],
    ) -> None:
        """Convert the first of `parts` to qcow2 in the second part.

        `worked` gets the numbers of written bytes.

        After a cancellation qemu-img has ended, and the second part has arbitrary content.

        Raises:
            VirtbusError: 413 `image_too_large`. 422 `conversion_failed`, `conversion_limit`,
                `sandbox_unavailable`. 503 `image_quota`, `disk_full`, `store_error`.
        """
        source, into = parts
        await self._threads.run(into.restart, None)
        cpu_s = int(self._limits.free_decode_s + source.offset / self._limits.least_decode_bytes_s)
        seen = 0

        async def look() -> None:
            nonlocal seen
            await self._threads.run(into.expect, 0)
            written = await self._threads.run(into.written_bytes)
            worked(max(0, written - seen))
            seen = max(seen, written)

        files = qemu_img.Files(source.descriptor, into.descriptor)
        names = (qemu_img.name_of(files.source), qemu_img.name_of(files.target))
        arguments = ("-f", foreign.driver, "-O", "qcow2", *names)
        limits = (self._limits.max_bytes, cpu_s + 1)
        try:
            ended = await qemu_img.convert(files, limits, arguments, look, self._command)
        except TimeoutError:
            raise _over(url, cpu_s) from None
        if ended.code:
            raise self._failure(url, ended, cpu_s)
        while await self._threads.run(into.hash_more):
            pass

    def _failure(self, url: str, ended: qemu_img.Ended, cpu_s: int) -> VirtbusError:
        if ended.is_unavailable:
            return VirtbusError(
                Code.UNSUPPORTED,
                "sandbox_unavailable",
                f"this node cannot convert {shown(url)}: {ended.why}; use a node where "
                "'virtbus doctor' accepts 'image conversion', or offer a qcow2 that "
                "'qemu-img convert -O qcow2' makes",
            )
        if ended.is_over_cpu:
            return _over(url, cpu_s)
        if ended.is_disk_full:
            return disk_full("the image store's disk is full")
        if "File too large" in ended.stderr or ended.code == -signal.SIGXFSZ:
            return too_large(url, self._limits.max_bytes, self._limits.max_bytes)
        return VirtbusError(
            Code.UNSUPPORTED,
            "conversion_failed",
            f"{shown(url)} cannot be converted: qemu-img ended with {ended.code}, {ended.why}; "
            "check it with 'qemu-img check', or build it again",
        )


def _over(url: str, cpu_s: int) -> VirtbusError:
    return VirtbusError(
        Code.UNSUPPORTED,
        "conversion_limit",
        f"{shown(url)} takes more than the {cpu_s} s of CPU time that its size allows for a "
        "conversion; convert it yourself with 'qemu-img convert -O qcow2'",
    )
