"""Reads and takes QEMU's locks of a disk's file (QEMU: block/file-posix.c; Linux: fcntl).

A QEMU with an open disk locks bytes of the disk's file, one for each permission. So the kernel
shows an open disk, even of a QEMU that libvirt has lost.
"""

import fcntl
import os
import struct

_FIRST_BYTE, _BYTES = 100, 200
"""First byte and size of the range to lock.

Bytes 100 to 163 are QEMU's own permissions. Bytes 200 to 263 are permissions that QEMU forbids to
other programs.
"""
_FLOCK = struct.Struct("hhqqi4x")
_ALL = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_BYTE, _BYTES, 0)


def locked(descriptor: int) -> bool:
    """Return True if a QEMU has the file open. A read-only descriptor is enough."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _ALL)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def take(descriptor: int) -> bool:
    """Lock the file against QEMU until the descriptor is closed; return False if a QEMU has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _ALL)
    except BlockingIOError:
        return False
    return True
