"""Copies images from `file://` URLs beneath the allowed roots.

The store needs copies, because the files of the URLs may change later.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.sources import Validators, beneath, shown
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.openat2 import open_beneath
from virtbus.imaged.edge.partial_download import CHUNK_BYTES, PartialDownload
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes

OnBytes = Callable[[int, int | None], None]
"""Called with (bytes done, total bytes if known)."""

_CHUNKS_PER_CALL = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a transfer; `unchanged` if the stored copy is still current."""

    validators: Validators
    unchanged: bool = False
    digest: str = ""
    """The digest of the fetched bytes. A stored file that was converted has another digest."""


def too_large(url: str, size_bytes: int, max_bytes: int) -> VirtbusError:
    """Return 413 `image_too_large`."""
    return VirtbusError(
        Code.TOO_LARGE,
        "image_too_large",
        f"{shown(url)} has {format_bytes(size_bytes)} or more; at most {format_bytes(max_bytes)} "
        "are fetched (setting max_bytes)",
    )


def not_found(url: str) -> VirtbusError:
    """Return 404 `image_not_found`."""
    return VirtbusError(
        Code.NOT_FOUND,
        "image_not_found",
        f"there is no image at {shown(url)}; check the address, or put the file there",
    )


class LocalFiles:
    """Copies `file://` URLs into parts (`PartialDownload`)."""

    def __init__(
        self, roots: tuple[str, ...], limits: TransferLimits, threads: DiskThreads
    ) -> None:
        self._roots = roots
        self._limits = limits
        self._threads = threads

    async def fetch(
        self, url: str, part: PartialDownload, known: Validators, on_bytes: OnBytes
    ) -> Fetched:
        """Copy the file into `part`, by reflink if the file system supports it.

        `known` are the validators of the stored copy. If the file has the same validators, nothing
        is copied.

        Raises:
            VirtbusError: 403 `file_not_allowed`. 404 `image_not_found`. 413 `image_too_large`. 422
                `file_not_regular`. 503 `file_changed`, `image_quota`, `disk_full`, `store_error`.
        """
        root, parts = beneath(url, self._roots)
        descriptor = await self._threads.run(_open, url, root, parts)
        try:
            before = os.fstat(descriptor)
            validators = Validators(etag=_etag(before))
            if known.etag == validators.etag:
                return Fetched(validators, unchanged=True)
            if before.st_size > self._limits.max_bytes:
                raise too_large(url, before.st_size, self._limits.max_bytes)
            await self._threads.run(part.restart, None)
            await self._copy(descriptor, part, before, on_bytes)
            if _etag(os.fstat(descriptor)) != validators.etag or part.offset != before.st_size:
                raise VirtbusError(
                    Code.UNAVAILABLE,
                    "file_changed",
                    f"{shown(url)} changed while it was copied; let its writer end, then ask again",
                )
            return Fetched(validators)
        finally:
            os.close(descriptor)

    async def _copy(
        self, source: int, part: PartialDownload, status: os.stat_result, on_bytes: OnBytes
    ) -> None:
        size_bytes = status.st_size
        cloned = await self._threads.run(part.clone, source)
        if not cloned:
            await self._threads.run(part.expect, min(size_bytes, status.st_blocks * 512))
        step = part.hash_more if cloned else lambda: _copy_chunk(source, part)
        while await self._threads.run(_repeat, step):
            on_bytes(part.offset, size_bytes)
            if part.offset > size_bytes:
                return  # the file grew during the copy; `fetch` detects it


def _repeat(step: Callable[[], bool]) -> bool:
    return all(step() for _ in range(_CHUNKS_PER_CALL))


def _copy_chunk(source: int, part: PartialDownload) -> bool:
    chunk = os.pread(source, CHUNK_BYTES, part.offset)
    if chunk:
        part.write(chunk)
    return bool(chunk)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _open(url: str, root: str, parts: tuple[str, ...]) -> int:
    try:
        return open_beneath(root, parts)
    except FileNotFoundError:
        raise not_found(url) from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            code, reason, why = Code.UNSUPPORTED, "file_not_regular", "is not a regular file"
        elif error.errno in {errno.ELOOP, errno.ENOTDIR}:
            code, reason, why = Code.DENIED, "file_not_allowed", "is reached through a symlink"
        else:
            code, reason = Code.DENIED, "file_not_allowed"
            why = f"cannot be opened ({error.strerror})"
        raise VirtbusError(
            code, reason, f"{shown(url)} {why}; put the image file itself there"
        ) from error
