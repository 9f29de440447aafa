"""Judges images in formats that QEMU can convert, before QEMU reads them (IMG-04, IMG-05).

An image is convertible only if it needs no other file. This module parses only the virtual size and
the fields that can name another file (QEMU: `block/vmdk.c`, `vdi.c`, `vpc.c`, `vhdx.c`). QEMU reads
all other fields, in a sandbox (`edge.conversion`).
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.formats import HEAD_BYTES, has_partition_table
from virtbus.schemas.errors import Code, VirtbusError

ReadAt = Callable[[int, int], bytes]
"""`read_at(offset, length)` returns bytes of the file; fewer bytes at the end of the file."""

SECTOR_BYTES = 512
MAX_DESCRIPTOR_BYTES = 64 * 1024
"""Limit of the descriptor of a vmdk, which usually has 10 KiB (IMG-05)."""
MAX_VHDX_ENTRIES = 2047

_VMDK = struct.Struct("<4sIIQQQQIQQQ")
_VMDK_ONE_FILE = frozenset({b"monolithicsparse", b"streamoptimized"})
_CREATE_TYPE = re.compile(rb'^[ \t]*createtype[ \t]*=[ \t]*"([a-z0-9]{1,32})"', re.MULTILINE)
_EXTENT = re.compile(rb"^[ \t]*(?:rw|rdonly|noaccess)[ \t]+[0-9]+[ \t]+([a-z]+)", re.MULTILINE)
_GD_AT_END = 0xFFFF_FFFF_FFFF_FFFF
_VDI_PLAIN = {1: "dynamic", 2: "static"}
_VHD_PLAIN = {2: "fixed", 3: "dynamic"}
_VHDX_METADATA = bytes.fromhex("06a27c8b90479a4bb8fe575f050f886e")
_VHDX_PARAMETERS = bytes.fromhex("3767a1ca36fa434db3b633f0aa44e76b")
_VHDX_SIZE = bytes.fromhex("2442a52f1bcd7648b2115dbed83bf4b8")
_VHDX_HAS_PARENT = 2
_QCOW2_REFERENCES = frozenset({qcow2.EXT_DATA_FILE, qcow2.EXT_ENCRYPTION, qcow2.EXT_BACKING_FORMAT})


@dataclass(frozen=True, slots=True)
class Foreign:
    """A convertible image: QEMU's name of its format, and its virtual size in bytes."""

    driver: str
    virtual_size_bytes: int


def judge(names: tuple[str, ...], size_bytes: int, read_at: ReadAt) -> Foreign | None:
    """Return the image if QEMU may convert it; None if `header.inspect` has to judge it.

    `names` are the formats that `formats.claims` found in the file.

    Raises:
        VirtbusError: 422 `foreign_reference`: the image needs another file. 422 `header_invalid`:
            its header is damaged.
    """
    judges = {"vmdk": _vmdk, "vdi": _vdi, "vhd": _vhd, "vhdx": _vhdx, "qcow2": _qcow2}
    if len(names) != 1 or names[0] not in judges:
        return None
    # A fixed vhd is a raw disk with a footer, so it may begin with a partition table. A file of any
    # other format with a partition table is a raw disk as well: `header.inspect` refuses it.
    if names != ("vhd",) and has_partition_table(read_at(0, 2 * SECTOR_BYTES)):
        return None

    def within(offset: int, length: int) -> bytes:
        return read_at(offset, length) if 0 <= offset < size_bytes else b""

    try:
        return judges[names[0]](size_bytes, within)
    except struct.error:
        _damaged(names[0], "it is too short")


def _damaged(format_name: str, what: str) -> NoReturn:
    raise VirtbusError(
        Code.UNSUPPORTED,
        "header_invalid",
        f"the image's {format_name} header is damaged: {what}; fetch or build the image again",
    )


def _refers(format_name: str, what: str) -> NoReturn:
    raise VirtbusError(
        Code.UNSUPPORTED,
        "foreign_reference",
        f"the {format_name} image needs another file: {what}; on the machine with that file, "
        "flatten it with 'qemu-img convert -O qcow2'",
    )


def _vmdk(size_bytes: int, read_at: ReadAt) -> Foreign:
    head = read_at(0, SECTOR_BYTES)
    if head[:4] != b"KDMV":
        _refers("vmdk", "it is a descriptor or an old format, whose data may be anywhere")
    header = _VMDK.unpack_from(head)
    if header[-2] == _GD_AT_END:
        # QEMU reads the header again, from the sector before the end-of-stream marker.
        footer = _VMDK.unpack_from(read_at(size_bytes - 2 * SECTOR_BYTES, SECTOR_BYTES))
        if footer[0] != b"KDMV" or footer[3:7] != header[3:7]:
            _damaged("vmdk", "its footer and its header differ")
    capacity, _, start, length = header[3:7]
    if not 0 < capacity < 1 << 53 or not 0 < start < 1 << 32:
        _refers("vmdk", "it has no data of its own")
    if length * SECTOR_BYTES > MAX_DESCRIPTOR_BYTES:
        _damaged("vmdk", f"a descriptor of {length} sectors")
    text = read_at(start * SECTOR_BYTES, MAX_DESCRIPTOR_BYTES)
    # QEMU looks for a parent in the second sector, even if the descriptor is elsewhere.
    _vmdk_descriptor((read_at(0, MAX_DESCRIPTOR_BYTES) + text).lower(), text.partition(b"\0")[0])
    return Foreign("vmdk", capacity * SECTOR_BYTES)


def _vmdk_descriptor(area: bytes, text: bytes) -> None:
    if b"parentfilenamehint" in area:
        _refers("vmdk", "it has a parent")
    text = text.lower()
    types, extents = _CREATE_TYPE.findall(text), _EXTENT.findall(text)
    if len(types) != 1 or types[0] not in _VMDK_ONE_FILE or extents != [b"sparse"]:
        _refers("vmdk", "only monolithicSparse and streamOptimized are whole in one file")


def _vdi(_size_bytes: int, read_at: ReadAt) -> Foreign:
    head = read_at(0, SECTOR_BYTES)
    (kind,) = struct.unpack_from("<I", head, 76)
    (virtual,) = struct.unpack_from("<Q", head, 368)
    if kind not in _VDI_PLAIN or any(head[424:456]):
        _refers("vdi", "it is a difference to another image")
    return Foreign("vdi", virtual)


def _vhd(size_bytes: int, read_at: ReadAt) -> Foreign:
    for offset in (size_bytes - SECTOR_BYTES, size_bytes - SECTOR_BYTES + 1, 0):
        footer = read_at(offset, SECTOR_BYTES)
        if not footer.startswith(b"conectix"):
            continue
        (virtual,) = struct.unpack_from(">Q", footer, 48)
        cylinders, heads, sectors, kind = struct.unpack_from(">HBBI", footer, 56)
        if kind not in _VHD_PLAIN:
            _refers("vhd", "it is a difference to another image")
        geometry = cylinders * heads * sectors * SECTOR_BYTES
        return Foreign("vpc", max(virtual, geometry))
    _damaged("vhd", "it has no footer")


def _vhdx(_size_bytes: int, read_at: ReadAt) -> Foreign:
    regions = _vhdx_entries(read_at(192 * 1024, 64 * 1024), b"regi", 8, 16)
    for guid, offset, _ in regions:
        if guid == _VHDX_METADATA:
            items = _vhdx_entries(read_at(offset, 64 * 1024), b"metadata", 10, 32)
            return _vhdx_metadata(read_at, offset, items)
    _damaged("vhdx", "it has no metadata")


def _vhdx_entries(
    table: bytes, magic: bytes, count_at: int, at: int
) -> list[tuple[bytes, int, int]]:
    """Return (GUID, offset, length) of a table's entries."""
    (count,) = struct.unpack_from("<H", table, count_at)
    if not table.startswith(magic) or count > MAX_VHDX_ENTRIES:
        _damaged("vhdx", "a table is not where it should be")
    layout = struct.Struct("<16sQI" if magic == b"regi" else "<16sII")
    return [layout.unpack_from(table, at + 32 * index) for index in range(count)]


def _vhdx_metadata(read_at: ReadAt, base: int, items: list[tuple[bytes, int, int]]) -> Foreign:
    found = {guid: read_at(base + offset, 8) for guid, offset, _ in items}
    if len(found) != len(items) or not {_VHDX_PARAMETERS, _VHDX_SIZE} <= set(found):
        _damaged("vhdx", "its metadata is incomplete or ambiguous")
    _, flags = struct.unpack("<II", found[_VHDX_PARAMETERS])
    if flags & _VHDX_HAS_PARENT:
        _refers("vhdx", "it is a difference to another image")
    (virtual,) = struct.unpack("<Q", found[_VHDX_SIZE])
    return Foreign("vhdx", virtual)


def _qcow2(_size_bytes: int, read_at: ReadAt) -> Foreign | None:
    """Return a qcow2 image that `qcow2.parse` refuses, but that QEMU may convert.

    Such an image has snapshots or bitmaps, or was not closed cleanly, and has no other fault.
    Return None for any other qcow2 image: `qcow2.parse` judges it.
    """
    head = read_at(0, HEAD_BYTES)
    fields = qcow2.read_fields(head)
    extensions = qcow2.read_extensions(head, fields)
    foreign = fields.nb_snapshots or fields.incompatible & qcow2.DIRTY
    foreign = foreign or qcow2.EXT_BITMAPS in extensions
    refers = fields.backing_file_offset or fields.backing_file_size or fields.crypt_method
    refers = refers or fields.autoclear & qcow2.AUTOCLEAR_RAW_DATA
    other = fields.incompatible & ~(qcow2.DIRTY | qcow2.COMPRESSION | qcow2.EXTENDED_L2)
    if not foreign or refers or other or _QCOW2_REFERENCES & set(extensions):
        return None
    return Foreign("qcow2", fields.size)
