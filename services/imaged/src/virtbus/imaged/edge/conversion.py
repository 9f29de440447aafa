"""Converts images of other formats to qcow2, by qemu-img in a sandbox (ADR 0041)."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from virtbus.imaged.core.archive import printable
from virtbus.imaged.core.foreign import Foreign
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.sources import shown
from virtbus.imaged.edge import sandbox
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.local_files import too_large
from virtbus.imaged.edge.partial_download import PartialDownload, disk_full
from virtbus.schemas.errors import Code, VirtbusError

QEMU_IMG = "/usr/bin/qemu-img"
ADDRESS_BYTES = 1024**3
"""Address space of qemu-img; it needs 140 MiB, and 1 MiB more for each request that waits."""
_LOOK_S = 0.1
"""Interval of checks for free space, progress and time."""
_WALL_PER_CPU = 4
_MAX_STDERR_BYTES = 4096


class Conversions:
    """Converts parts, within the limits of a transfer."""

    def __init__(
        self, limits: TransferLimits, threads: DiskThreads, command: tuple[str, ...] = (QEMU_IMG,)
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
        """Write the first of `parts` to the second as qcow2; `worked` gets the written bytes.

        After a cancellation qemu-img has ended, and the second part has arbitrary content.

        Raises:
            VirtbusError: 413 `image_too_large`; 422 `conversion_failed`, `conversion_limit`,
                `sandbox_unavailable`; 503 `disk_full`, `store_error`.
        """
        source, into = parts
        await self._threads.run(into.restart, None)
        cpu_s = int(self._limits.free_decode_s + source.offset / self._limits.least_decode_bytes_s)
        with lent(source.descriptor), lent(into.descriptor):
            process = await self._start(foreign, source.descriptor, into.descriptor, cpu_s + 1)
            try:
                async with asyncio.timeout(_WALL_PER_CPU * (cpu_s + 1)):
                    await self._watch(process, into, worked)
            except TimeoutError:
                raise _over(url, cpu_s) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode:
            raise await self._failure(url, process, cpu_s)
        while await self._threads.run(into.hash_more):
            pass

    async def _start(
        self, foreign: Foreign, source: int, target: int, cpu_s: int
    ) -> asyncio.subprocess.Process:
        limits = (ADDRESS_BYTES, self._limits.max_bytes, cpu_s)
        files = (f"/proc/self/fd/{source}", f"/proc/self/fd/{target}")
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(Path(sandbox.__file__)),
            str(source), str(target), *map(str, limits), "--",
            *self._command, "convert", "-q", "-f", foreign.driver, "-O", "qcow2", *files,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(source, target),
            cwd="/",
            env={},
        )  # fmt: skip

    async def _watch(
        self,
        process: asyncio.subprocess.Process,
        into: PartialDownload,
        worked: Callable[[int], None],
    ) -> None:
        seen = 0
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LOOK_S)
            await self._threads.run(into.expect, 0)
            written = await self._threads.run(into.written_bytes)
            worked(max(0, written - seen))
            seen = max(seen, written)

    async def _failure(
        self, url: str, process: asyncio.subprocess.Process, cpu_s: int
    ) -> VirtbusError:
        stderr = await process.stderr.read(_MAX_STDERR_BYTES) if process.stderr else b""
        said = stderr.decode(errors="replace").strip()
        if process.returncode == sandbox.UNAVAILABLE:
            return VirtbusError(
                Code.UNSUPPORTED,
                "sandbox_unavailable",
                f"this node cannot convert {shown(url)}: {printable(said)}; use a node where "
                "'virtbus doctor' accepts 'image conversion', or offer a qcow2 that "
                "'qemu-img convert -O qcow2' makes",
            )
        if process.returncode in {-signal.SIGXCPU, -signal.SIGKILL}:
            return _over(url, cpu_s)
        if "No space left" in said:
            return disk_full("the image store's disk is full")
        if "File too large" in said or process.returncode == -signal.SIGXFSZ:
            return too_large(url, self._limits.max_bytes, self._limits.max_bytes)
        return VirtbusError(
            Code.UNSUPPORTED,
            "conversion_failed",
            f"{shown(url)} cannot be converted: qemu-img ended with {process.returncode}, "
            f"{printable(said)}; check it with 'qemu-img check', or build it again",
        )


def _over(url: str, cpu_s: int) -> VirtbusError:
    return VirtbusError(
        Code.UNSUPPORTED,
        "conversion_limit",
        f"{shown(url)} takes more than {cpu_s} s of CPU time to convert, which its size allows; "
        "convert it yourself with 'qemu-img convert -O qcow2'",
    )


@contextlib.contextmanager
def lent(descriptor: int) -> Iterator[None]:
    """Give a file to the sandbox's user meanwhile, if this is root."""
    if os.geteuid() != 0:
        yield
        return
    os.fchown(descriptor, sandbox.NOBODY, sandbox.NOBODY)
    try:
        yield
    finally:
        os.fchown(descriptor, 0, 0)
