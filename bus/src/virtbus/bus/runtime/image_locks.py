"""Reads and takes QEMU's locks of a disk's file (QEMU: block/file-posix.c; Linux: fcntl).

Each QEMU that has a disk open locks bytes of the disk's file, one for each permission. So the
kernel shows that a disk is open, even in a QEMU that libvirt has lost.
"""

import fcntl
import os
import struct

_FIRST_BYTE, _BYTES = 100, 200
"""The range of bytes to lock: its first byte and its size.

Bytes 100 to 163 are permissions. Bytes 200 to 263 forbid permissions to other programs.
"""
_FLOCK = struct.Struct("hhqqi4x")
_ALL = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_BYTE, _BYTES, 0)


def locked(descriptor: int) -> bool:
    """Return True if a QEMU has the file open. The descriptor may be read-only."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _ALL)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def take(descriptor: int) -> bool:
    """Lock the file against QEMU until the descriptor is closed; return False if a QEMU has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _ALL)
    except BlockingIOError:
        return False
    return True
