"""Reads the names of the dirty bitmaps in a qcow2 disk (QEMU's `docs/interop/qcow2.txt`)."""

import struct
from collections.abc import Callable

from virtbus.imaged.core import qcow2
from virtbus.schemas.errors import VirtbusError

MAX_DIRECTORY_BYTES = 1024**2
"""Limit of the directory of bitmaps. virtbus keeps one bitmap in a disk, so the directories of its
disks are far smaller."""
_EXTENSION = struct.Struct(">IIQQ")
"""The number of bitmaps, zeros, then size and offset of their directory."""
_ENTRY = struct.Struct(">QIIBBHI")
"""An entry of the directory: offset and size of the bitmap's table, flags, type, granularity, and
the sizes of the name and of extra data."""
_IN_USE, _AUTO = 1, 2
_DIRTY_TRACKING = 1


def usable_bitmaps(head: bytes, read: Callable[[int, int], bytes]) -> frozenset[str]:
    """Return the names of the bitmaps that have recorded all writes since they were made.

    `head` is the start of the file; `read` returns bytes of the file by offset and length. If the
    header or the directory is invalid, the result is empty.
    """
    try:
        fields = qcow2.read_fields(head)
        extension = qcow2.read_extensions(head, fields).get(qcow2.EXT_BITMAPS, b"")
    except VirtbusError:
        return frozenset()
    if not fields.autoclear & qcow2.AUTOCLEAR_BITMAPS or len(extension) < _EXTENSION.size:
        return frozenset()
    count, _, size, offset = _EXTENSION.unpack_from(extension)
    if size > MAX_DIRECTORY_BYTES or offset >= 1 << 63:
        return frozenset()
    return _usable(read(offset, size), count)


def _usable(directory: bytes, count: int) -> frozenset[str]:
    found, at = set(), 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            break
        _, _, flags, kind, _, name_bytes, extra_bytes = _ENTRY.unpack_from(directory, at)
        name_at = at + _ENTRY.size + extra_bytes
        name = directory[name_at : name_at + name_bytes]
        if len(name) < name_bytes:
            break
        if flags & (_IN_USE | _AUTO) == _AUTO and kind == _DIRTY_TRACKING and name.isascii():
            found.add(name.decode())
        at += -(-(_ENTRY.size + extra_bytes + name_bytes) // 8) * 8
    return frozenset(found)
