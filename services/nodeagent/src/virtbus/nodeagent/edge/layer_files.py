"""Protects and removes layers, the frozen files of disks. All functions block on the disk."""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
"""The requests and the flag of ioctl_iflags(2)."""
_LONG = struct.Struct("l")
_CANNOT = frozenset({errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.ENOSYS})
_READABLE = 0o444
SUFFIX, NOTE_SUFFIX = ".qcow2", ".json"


def protect(folder: Path) -> bool:
    """Make each layer readable for all, and immutable. Return False if there are no layers.

    A file with a second hard link stays mutable, because no link of an immutable file can be
    removed. A guest or a snapshot uses the file through the second link.
    """
    try:
        directory = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return False
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]  # noqa: PTH208
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                _protect(name, directory)
        return bool(names)
    finally:
        os.close(directory)


def _protect(name: str, directory: int) -> None:
    descriptor = os.open(name, _FILE, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        with contextlib.suppress(PermissionError):  # an immutable file, or an agent without root
            if found.st_mode & 0o777 != _READABLE:
                os.fchmod(descriptor, _READABLE)
        if found.st_nlink == 1:
            _set_immutable(descriptor, on=True)
    finally:
        os.close(descriptor)


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove layers and their notes, then the folder if it is empty; raises OSError."""
    directory = os.open(folder, _FOLDER)
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(name, _FILE, dir_fd=directory)
                try:
                    _set_immutable(descriptor, on=False)
                finally:
                    os.close(descriptor)
                os.unlink(name, dir_fd=directory)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name.removesuffix(SUFFIX) + NOTE_SUFFIX, dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)
    with contextlib.suppress(OSError):  # the folder has other files
        folder.rmdir()


def _set_immutable(descriptor: int, *, on: bool) -> None:
    """Set or clear the immutable flag, if the file system and the agent's rights permit."""
    try:
        (flags,) = _LONG.unpack(fcntl.ioctl(descriptor, _GET_FLAGS, _LONG.pack(0)))
        wanted = flags | _IMMUTABLE if on else flags & ~_IMMUTABLE
        if wanted != flags:
            fcntl.ioctl(descriptor, _SET_FLAGS, _LONG.pack(wanted))
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
