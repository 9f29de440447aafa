"""Writes volumes to devices of the host: claim, content, comparison, and the final mark (ADR 0060).

The agent opens the devices. All methods block on the disk.
"""

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
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
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.volume_ref import VolumeRef

CHUNK_BYTES = 4 * 1024**2
ZERO_BYTES = 64 * 1024**2
_ZEROES = bytes(CHUNK_BYTES)
_BLKZEROOUT = 0x127F
"""linux/fs.h: the blocks read as zeroes; the device frees them if it can."""

OpenDevice = Callable[[str, str], int]
"""Opens the device of a pool's volume, as `device_socket.open_device`."""


class Device:
    """One open device."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.room_bytes = max(0, os.lseek(descriptor, 0, os.SEEK_END) - END_BYTES)

    # --- marks ------------------------------------------------------------------------------
    def claim(self) -> DeviceMark | None:
        """Return the claim."""
        return self._mark(self.room_bytes)

    def filled(self) -> DeviceMark | None:
        """Return the mark of complete content."""
        return self._mark(self.room_bytes + BLOCK_BYTES)

    def put_claim(self, ref: VolumeRef) -> None:
        """Take the device for a volume, durable on return.

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
        """Mark the content as complete, durable on return. The content is durable already."""
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
        """Return True if both ends are empty. A torn claim is ours, and the first write of all."""
        first = os.pread(self.descriptor, END_BYTES, 0)
        last = os.pread(self.descriptor, END_BYTES, self.room_bytes)
        torn = last.startswith(MAGIC)
        return not any(first) and not any(last[BLOCK_BYTES:] if torn else last)

    # --- content ----------------------------------------------------------------------------
    def write(self, at: int, data: bytes) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            done = os.pwrite(self.descriptor, left, at)
            left, at = left[done:], at + done

    def zero(self, at: int, count: int) -> None:
        """Make `count` bytes zero."""
        with suppress(OSError):  # no block device, or one without the call
            fcntl.ioctl(self.descriptor, _BLKZEROOUT, struct.pack("QQ", at, count))
            return
        for here in range(at, at + count, CHUNK_BYTES):
            self.write(here, bytes(min(CHUNK_BYTES, at + count - here)))

    def sync(self) -> None:
        """Make all writes durable."""
        os.fsync(self.descriptor)

    def digest_of(self, extents: list[tuple[int, int]]) -> str:
        """Return the SHA-256 of parts of the device, read from the device itself."""
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
    """Yield an unnamed file in a folder, which no crash leaves behind; raises VirtbusError 503."""
    try:
        raw = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise store_error(error) from error
    try:
        yield raw
    finally:
        os.close(raw)


class Devices:
    """The devices of the node's pools."""

    def __init__(self, open_device: OpenDevice) -> None:
        self._open_device = open_device

    @contextmanager
    def opened(self, ref: VolumeRef) -> Iterator[Device]:
        """Open the device of a volume; raises VirtbusError 503 `pool_gone`, `store_error`."""
        try:
            descriptor = self._open_device(ref.pool, ref.key)
        except OSError as error:
            why = error.strerror or "its agent does not answer"
            message = f"the device of the volume {ref.name} cannot be opened: {why}"
            raise VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=5000) from error
        try:
            yield Device(descriptor)
        except OSError as error:
            raise store_error(error) from error
        finally:
            os.close(descriptor)

    def filled(self, ref: VolumeRef) -> DeviceMark | None:
        """Return the mark of the volume's complete content; None if the device lacks that."""
        with self.opened(ref) as device:
            mark = device.filled()
            return mark if mark is not None and mark.ref.folder == ref.folder else None

    def filled_bytes(self, ref: VolumeRef) -> int | None:
        """Return the size of the volume; None if the device lacks its complete content."""
        mark = self.filled(ref)
        return None if mark is None else mark.size_bytes

    def begin(self, ref: VolumeRef, size_bytes: int) -> int:
        """Take the device; return the bytes that must become zero before it is written.

        Raises:
            VirtbusError: 400 `disk_too_large`; as `Device.put_claim`.
        """
        with self.opened(ref) as device:
            if size_bytes > device.room_bytes:
                message = (
                    f"the volume {ref.name} would have {format_bytes(size_bytes)}; its device has "
                    f"room for {format_bytes(device.room_bytes)}"
                )
                raise VirtbusError(Code.INVALID, "disk_too_large", message)
            device.put_claim(ref)
            device.drop_filled()
            return device.room_bytes

    def zero(self, ref: VolumeRef, at: int, count: int) -> None:
        """Make a part of the device zero."""
        with self.opened(ref) as device:
            device.zero(at, count)

    def read_into(self, ref: VolumeRef, target: int, at: int, count: int) -> None:
        """Copy a part of the content to a raw file. Zeroes become holes."""
        with self.opened(ref) as device:
            for here in range(at, at + count, CHUNK_BYTES):
                data = os.pread(device.descriptor, min(CHUNK_BYTES, at + count - here), here)
                if data != _ZEROES[: len(data)]:
                    os.pwrite(target, data, here)
            os.ftruncate(target, at + count)

    def finish(
        self, ref: VolumeRef, source: int | None, size_bytes: int, operation: str = ""
    ) -> None:
        """Copy a raw file to the device, compare it with what the device returns, and mark it.

        `operation` is the one whose work this is.

        Raises:
            VirtbusError: 409 `disk_damaged`: the device returns other bytes.
        """
        with self.opened(ref) as device:
            extents = extents_of(source) if source is not None else []
            wanted = hashlib.sha256()
            for at, count in extents:
                for here in range(at, at + count, CHUNK_BYTES):
                    data = os.pread(source or 0, min(CHUNK_BYTES, at + count - here), here)
                    wanted.update(data)
                    device.write(here, data)
            device.sync()
            if device.digest_of(extents) != wanted.hexdigest():
                message = f"the device of {ref.name} returns other bytes than were written to it"
                raise VirtbusError(Code.CONFLICT, "disk_damaged", message)
            digest = wanted.hexdigest()
            device.put_filled(
                DeviceMark(
                    kind="filled",
                    ref=ref,
                    digest=digest,
                    size_bytes=size_bytes,
                    operation=operation,
                )
            )

    def begin_release(self, ref: VolumeRef) -> int:
        """Return the bytes that must become zero before `end_release`; 0: not our device."""
        with self.opened(ref) as device:
            there = device.claim()
            if there is None or there.ref.folder != ref.folder:
                return 0
            device.drop_filled()
            return device.room_bytes

    def end_release(self, ref: VolumeRef) -> None:
        """Give the device up: its content is gone."""
        with self.opened(ref) as device:
            device.sync()
            device.drop_claim()
