"""Reads and writes one open device, and its marks (ADR 0060). All methods block on the disk.

The marks are two blocks at the end of the device. They name the volume that has claimed the device,
and record that the content is complete.
"""

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from virtbus.imaged.core.device_marks import (
    BLOCK_BYTES,
    END_BYTES,
    MAGIC,
    DeviceMark,
    sealed,
    unsealed,
)
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.volume_ref import VolumeRef

CHUNK_BYTES = 4 * 1024**2
_BLKZEROOUT = 0x127F
"""The ioctl of linux/fs.h that makes blocks zero. The device frees the blocks if it can."""


class Device:
    """One open device."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.room_bytes = max(0, os.lseek(descriptor, 0, os.SEEK_END) - END_BYTES)

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def old_bytes(self) -> int:
        """Return the number of bytes, from the start, that may have old data."""
        return self.room_bytes

    def seen_bytes(self, size_bytes: int) -> int:
        """Return the number of bytes that a guest sees of a volume of `size_bytes`."""
        return size_bytes

    # --- marks ------------------------------------------------------------------------------
    def claim(self) -> DeviceMark | None:
        """Return the mark with which a volume has claimed the device; None without a claim."""
        return self._mark(self.room_bytes)

    def filled(self) -> DeviceMark | None:
        return self._mark(self.room_bytes + BLOCK_BYTES)

    def put_claim(self, ref: VolumeRef) -> None:
        """Claim the device for a volume, durable on return.

        Raises:
            VirtbusError: 409 `device_taken`, `device_not_blank`.
        """
        there = self.claim()
        if there is not None and there.ref.folder != ref.folder:
            message = f"the device has the volume {there.ref.key}; delete that, or correct pools"
            raise VirtbusError(Code.CONFLICT, "device_taken", message)
        if there is None and not self._is_blank():
            message = (
                "the device is not empty, and no volume has it; if nobody needs its content, clear "
                "its first and last MiB (blkdiscard, or dd), then `virtbus volume fill`"
            )
            raise VirtbusError(Code.CONFLICT, "device_not_blank", message)
        self._put_mark(self.room_bytes, DeviceMark(kind="claim", ref=ref))

    def put_filled(self, mark: DeviceMark) -> None:
        """Mark the content, which the caller has made durable, as complete; durable on return."""
        self._put_mark(self.room_bytes + BLOCK_BYTES, mark)

    def drop_filled(self) -> None:
        """Remove the mark of complete content, durable on return."""
        self.write(self.room_bytes + BLOCK_BYTES, bytes(BLOCK_BYTES))
        self.sync()

    def drop_claim(self) -> None:
        """Give the device up, durable on return."""
        self.write(self.room_bytes, bytes(BLOCK_BYTES))
        self.sync()

    def _mark(self, at: int) -> DeviceMark | None:
        return unsealed(os.pread(self.descriptor, BLOCK_BYTES, at))

    def _put_mark(self, at: int, mark: DeviceMark) -> None:
        self.write(at, sealed(mark))
        self.sync()

    def _is_blank(self) -> bool:
        """Return True if both ends are zero. A partly written claim of virtbus counts as zero."""
        first = os.pread(self.descriptor, END_BYTES, 0)
        last = os.pread(self.descriptor, END_BYTES, self.room_bytes)
        torn = last.startswith(MAGIC)
        return not any(first) and not any(last[BLOCK_BYTES:] if torn else last)

    # --- content ----------------------------------------------------------------------------
    def write(self, at: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            done = os.pwrite(self.descriptor, left, at)
            left, at = left[done:], at + done

    def zero(self, at: int, count: int) -> None:
        with suppress(OSError):  # a file, or a block device that lacks this request
            fcntl.ioctl(self.descriptor, _BLKZEROOUT, struct.pack("QQ", at, count))
            return
        for here in range(at, at + count, CHUNK_BYTES):
            self.write(here, bytes(min(CHUNK_BYTES, at + count - here)))

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def digest_of(self, extents: list[tuple[int, int]]) -> str:
        """Return the SHA-256 of parts of the device, read from the device, not from the cache."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = hashlib.sha256()
        for at, count in extents:
            for here in range(at, at + count, CHUNK_BYTES):
                size = min(CHUNK_BYTES, at + count - here)
                found.update(os.pread(self.descriptor, size, here))
        return found.hexdigest()


def extents_of(descriptor: int) -> list[tuple[int, int]]:
    """Return the parts of a file that have data: position and length."""
    found, at, end = [], 0, os.fstat(descriptor).st_size
    while at < end:
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                break
            raise
        at = os.lseek(descriptor, data, os.SEEK_HOLE)
        found.append((data, at - data))
    return found


@contextmanager
def raw_file(folder: Path) -> Iterator[int]:
    """Yield an unnamed file, which no crash leaves in `folder`; raises VirtbusError 503."""
    try:
        raw = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise store_error(error) from error
    try:
        yield raw
    finally:
        os.close(raw)
