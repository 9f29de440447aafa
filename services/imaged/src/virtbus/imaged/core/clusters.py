"""Detects truncated qcow2 files: each cluster that their tables name must be in the file.

The caller provides a function that reads the file. The layout of entries is in QEMU's
`docs/interop/qcow2.txt`, "Cluster mapping".
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence

from virtbus.imaged.core.qcow2 import EXTENDED_L2, Fields, invalid
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes

MAX_L2_BYTES = 32 * 1024**2
"""Maximum bytes of L2 tables that are read. They map 256 GiB of data in clusters of 64 KiB, and
their check takes 1.5 s of CPU time.

Tables beyond the limit are not checked. This is safe, because QEMU checks its own reads.
"""
_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED = 1 << 62
_ALL_ZERO = 1
_SUBCLUSTERS_ALLOCATED = 0xFFFF_FFFF
_SECTOR_BYTES = 512

ReadAt = Callable[[int, int], bytes]
"""Returns bytes of the file, by offset and length."""


def check_clusters(fields: Fields, size_bytes: int, read_at: ReadAt) -> None:
    """Refuse a file of `size_bytes` that ends before a used cluster; the header is already checked.

    The last cluster may be incomplete, because some programs write only a part of it.

    Raises:
        VirtbusError: 422 `truncated`, `header_invalid`.
    """
    left_bytes = MAX_L2_BYTES
    seen: set[int] = set()
    for entry in _entries(read_at(fields.l1_table_offset, _l1_entries(fields) * 8)):
        offset = entry & _OFFSET
        if not offset or offset in seen:
            continue
        seen.add(offset)
        if offset % fields.cluster_bytes:
            invalid(f"an L2 table at {offset}")
        if offset + fields.cluster_bytes > size_bytes:
            raise _truncated(offset + fields.cluster_bytes, size_bytes)
        left_bytes -= fields.cluster_bytes
        if left_bytes < 0:
            return
        last = _last_byte(read_at(offset, fields.cluster_bytes), fields)
        if last >= size_bytes:
            raise _truncated(last + 1, size_bytes)


def _l1_entries(fields: Fields) -> int:
    """Return the number of L1 entries for the virtual size. Further entries have no meaning."""
    words = 2 if fields.incompatible & EXTENDED_L2 else 1
    covers_bytes = fields.cluster_bytes * (fields.cluster_bytes // (8 * words))
    return min(fields.l1_size, -(-fields.size // covers_bytes))


def _entries(table: bytes) -> Sequence[int]:
    words = array("Q")
    words.frombytes(table[: len(table) // 8 * 8])
    if sys.byteorder == "little":
        words.byteswap()
    return words


def _last_byte(table: bytes, fields: Fields) -> int:
    """Return the offset of the last used cluster, or of the last sector of compressed data."""
    return max(_in_use(_entries(table), fields), default=0)


def _in_use(entries: Sequence[int], fields: Fields) -> Iterator[int]:
    sectors_shift = 62 - (fields.cluster_bits - 8)
    compressed_offset = (1 << sectors_shift) - 1
    extended = bool(fields.incompatible & EXTENDED_L2)
    for index in range(0, len(entries), 2 if extended else 1):
        entry = entries[index]
        if entry & _COMPRESSED:
            more_sectors = (entry & (_COMPRESSED - 1)) >> sectors_shift
            first = (entry & compressed_offset) // _SECTOR_BYTES * _SECTOR_BYTES
            yield first + more_sectors * _SECTOR_BYTES
        elif entry & _OFFSET and _is_read(entry, entries[index + 1] if extended else None):
            yield entry & _OFFSET


def _is_read(entry: int, subclusters: int | None) -> bool:
    """Return True if the guest reads the cluster; False if it sees zeros instead.

    An allocated cluster may be marked as zeros.
    """
    if subclusters is not None:
        return bool(subclusters & _SUBCLUSTERS_ALLOCATED)
    return not entry & _ALL_ZERO


def _truncated(needed_bytes: int, size_bytes: int) -> VirtbusError:
    return VirtbusError(
        Code.UNSUPPORTED,
        "truncated",
        f"the qcow2 image is cut short: it has {format_bytes(size_bytes)} and uses "
        f"{format_bytes(needed_bytes)} or more; fetch or build it again whole, "
        "'qemu-img check' shows the damage",
    )
