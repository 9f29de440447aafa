"""Copies a disk's file: by a reflink if the file system has reflinks, otherwise piece by piece."""

import errno
import fcntl
import os
import struct
from contextlib import ExitStack
from pathlib import Path

from virtbus.imaged.edge import openat2
from virtbus.schemas.errors import Code, VirtbusError

PIECE_BYTES = 64 * 1024**2
READ_BYTES = 4 * 1024**2
FICLONE = 0x40049409
"""The request of ioctl_ficlone(2)."""
_NO_CLONE = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS})
_USED, _UNSHARED, _LOCKS = 100, 200, 64
"""QEMU's locks on a file (block/file-posix.c), for permissions n < `_LOCKS`. A program that uses
the permission n locks the byte `_USED` + n. A program that lets no other program use n locks the
byte `_UNSHARED` + n."""
_FLOCK = struct.Struct("hhqqi4x")


class DiskCopy:
    """The copy of one file. All methods block on the disk."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._size = os.fstat(source).st_size
        self._at = 0
        self._in_kernel = True

    def clone(self) -> bool:
        try:
            fcntl.ioctl(self._target, FICLONE, self._source)
        except OSError as error:
            if error.errno in _NO_CLONE:
                return False
            raise
        return True

    def step(self) -> int:
        """Copy the next piece; return its size, 0 at the end. Holes stay holes."""
        try:
            data = os.lseek(self._source, self._at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            os.ftruncate(self._target, self._size)
            return 0
        count = min(os.lseek(self._source, data, os.SEEK_HOLE) - data, PIECE_BYTES)
        done = self._piece(data, count)
        if not done:
            raise OSError(errno.EIO, "the disk became shorter")
        self._at = data + done
        return done

    def _piece(self, at: int, count: int) -> int:
        if self._in_kernel:
            try:
                return os.copy_file_range(self._source, self._target, count, at, at)
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._in_kernel = False
        return os.pwrite(self._target, os.pread(self._source, min(count, READ_BYTES), at), at)


def lock_disk(descriptor: int) -> None:
    """Keep QEMU from opening the disk of a descriptor, until the descriptor is closed.

    Raises:
        VirtbusError: 409 `disk_in_use`: a program uses the disk.
    """
    share_nothing = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _UNSHARED, _LOCKS, 0)
    used = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _USED, _LOCKS, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, share_nothing)
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, used)
    if _FLOCK.unpack(found)[0] != fcntl.F_UNLCK:
        message = "a guest uses the disk; stop its VM, then repeat"
        raise VirtbusError(Code.CONFLICT, "disk_in_use", message)


def open_disk(opened: ExitStack, path: Path) -> int:
    """Open a disk for reading, until `opened` ends; raises 409 `disk_unreadable`."""
    try:
        with openat2.opened_directory(path.parent) as folder:
            descriptor = openat2.open_file(path.name, folder)
    except OSError as error:
        message = f"the disk cannot be opened: {error.strerror}; see imaged's log"
        raise VirtbusError(Code.CONFLICT, "disk_unreadable", message) from error
    opened.callback(os.close, descriptor)
    return descriptor


def used_bytes(descriptor: int) -> int:
    """Return the disk space of an open file."""
    return os.fstat(descriptor).st_blocks * 512
