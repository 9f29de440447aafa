"""Computes the header of a qcow2 disk that becomes larger.

A disk made by `overlay.build` has at least one cluster for its L1 table, which is enough for 4 TiB.
Growth within these clusters changes only fields of the header, all in one sector. Larger growth
would have to move the table, as QEMU does (qcow2-cluster.c, `qcow2_grow_l1_table`), and is refused.

QEMU refuses a disk with a bitmap that is too short for the disk's size. So growth clears the
header's bit that declares the bitmaps valid. Then QEMU ignores the bitmaps, and the next backup is
a full backup.
"""

import struct

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.overlay import read_overlay
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes

SIZE_AT, _AUTOCLEAR_AT = 24, 88
_SIZES = struct.Struct(">QII")
"""The header's fields at SIZE_AT: size, crypt method, number of L1 entries."""
_AUTOCLEAR = struct.Struct(">Q")


def grown(head: bytes, size_bytes: int) -> tuple[int, bytes]:
    """Return the header's change for a disk of `size_bytes`: its offset and the new bytes.

    The new size is rounded up to sectors.

    Raises:
        VirtbusError: 409 `disk_damaged`. 422 `cannot_grow`: the disk would shrink, has snapshots,
            or its L1 table would need more clusters.
    """
    read_overlay(head)
    fields = qcow2.read_fields(head)
    size = -(-size_bytes // 512) * 512
    covers_bytes = fields.cluster_bytes * (fields.cluster_bytes // 8)
    entries = -(-size // covers_bytes)
    most = max(1, -(-fields.l1_size * 8 // fields.cluster_bytes)) * fields.cluster_bytes // 8
    if size < fields.size:
        raise _refused(f"it has {format_bytes(fields.size)}, and a disk never shrinks")
    if fields.nb_snapshots:
        raise _refused("it has internal snapshots")
    if entries > most:
        raise _refused(f"its tables reach {format_bytes(most * covers_bytes)}")
    sizes = _SIZES.pack(size, fields.crypt_method, max(entries, fields.l1_size))
    if not fields.autoclear & qcow2.AUTOCLEAR_BITMAPS:
        return SIZE_AT, sizes
    between = head[SIZE_AT + len(sizes) : _AUTOCLEAR_AT]
    left = _AUTOCLEAR.pack(fields.autoclear & ~qcow2.AUTOCLEAR_BITMAPS)
    return SIZE_AT, sizes + between + left


def _refused(why: str) -> VirtbusError:
    message = f"the volume's disk cannot grow: {why}; copy its files to a larger volume"
    return VirtbusError(Code.UNSUPPORTED, "cannot_grow", message)
