"""Parses the qcow2 header with our own code before any other program reads the file.

The layout is in QEMU's `docs/interop/qcow2.txt`. This parser is intentionally stricter than QEMU
(IMG-01, IMG-10). It refuses an image that needs another file, a key or a repair. It refuses
snapshots and bitmaps, too.
"""

import struct
from dataclasses import dataclass, replace
from typing import NoReturn

from virtbus.imaged.core.formats import QCOW2_MAGIC
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat

V2_HEADER_BYTES = 72
V3_HEADER_BYTES = 104
MAX_L1_BYTES = 32 * 1024**2
"""QEMU's QCOW_MAX_L1_SIZE."""
MAX_REFTABLE_BYTES = 8 * 1024**2
"""QEMU's QCOW_MAX_REFTABLE_SIZE."""

DIRTY, CORRUPT, DATA_FILE, COMPRESSION, EXTENDED_L2 = 1, 2, 4, 8, 16
_KNOWN_INCOMPATIBLE = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2
AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA = 1, 2

_SHOWN_CHARS = 100

EXT_END = 0
EXT_BACKING_FORMAT = 0xE2792ACA
EXT_DATA_FILE = 0x44415441
EXT_BITMAPS = 0x23852875
EXT_ENCRYPTION = 0x0537BE77

_FORBIDDEN_EXTENSIONS = {
    EXT_BACKING_FORMAT: "backing_file",
    EXT_DATA_FILE: "data_file",
    EXT_BITMAPS: "bitmaps",
    EXT_ENCRYPTION: "encrypted",
}
_NEXT_STEP = {
    "backing_file": "it needs {file}; flatten it with 'qemu-img convert -O qcow2'",
    "data_file": "it keeps its data in another file; flatten it with 'qemu-img convert -O qcow2'",
    "bitmaps": "it holds dirty bitmaps; remove them with 'qemu-img convert -O qcow2'",
    "encrypted": "encrypted images are not supported; convert it to a plain qcow2",
    "internal_snapshots": "it holds internal snapshots; drop them with 'qemu-img convert -O qcow2'",
    "dirty": "it was not closed cleanly; repair it with 'qemu-img check -r all' if you trust it",
    "corrupt": "it is marked corrupt; repair it with 'qemu-img check -r all' if you trust it",
}

_V2 = struct.Struct(">4sIQIIQIIQQIIQ")
_V3_MORE = struct.Struct(">QQQII")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The properties of an acceptable image. `version` and `cluster_bits` are 0 for raw."""

    format: ImageFormat
    virtual_size_bytes: int
    cluster_bits: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Fields:
    """The header's fields, named as in qcow2.txt. For v2, the fields of v3 have defaults."""

    version: int
    backing_file_offset: int
    backing_file_size: int
    cluster_bits: int
    size: int
    crypt_method: int
    l1_size: int
    l1_table_offset: int
    refcount_table_offset: int
    refcount_table_clusters: int
    nb_snapshots: int
    snapshots_offset: int
    incompatible: int = 0
    autoclear: int = 0
    refcount_order: int = 4
    header_length: int = V2_HEADER_BYTES
    compression_type: int = 0

    @property
    def cluster_bytes(self) -> int:
        return 1 << self.cluster_bits


def invalid(what: str) -> NoReturn:
    """Raise 422 `header_invalid`; `what` names the field."""
    raise VirtbusError(
        Code.UNSUPPORTED,
        "header_invalid",
        f"the image's qcow2 header is damaged: {what}; fetch or build the image again",
    )


def refuse(reason: str, file: str = "another file") -> NoReturn:
    """Raise 422 with a reason of `_NEXT_STEP`; `file` names the backing file."""
    step = _NEXT_STEP[reason].format(file=file)
    raise VirtbusError(Code.UNSUPPORTED, reason, f"the qcow2 image is refused: {step}")


def _backing_file(head: bytes, fields: Fields) -> str:
    """Return the backing file's name, escaped and shortened, because it comes from the image."""
    start = fields.backing_file_offset
    name = head[start : start + min(fields.backing_file_size, 1023)] if start else b""
    if not name:
        return "another file"
    text = ascii(name.decode(errors="backslashreplace"))[1:-1]
    cut = "…" if len(text) > _SHOWN_CHARS else ""
    return f"its backing file '{text[:_SHOWN_CHARS]}{cut}'"


def _require(good: bool, what: str) -> None:
    if not good:
        invalid(what)


def read_fields(head: bytes) -> Fields:
    """Return the fields of a v2 or v3 header, with only the checks that reading needs.

    Raises:
        VirtbusError: 422 `header_invalid`.
    """
    _require(len(head) >= V2_HEADER_BYTES and head[:4] == QCOW2_MAGIC, "it is too short")
    values = _V2.unpack_from(head)[1:]
    version, cluster_bits = values[0], values[3]
    _require(version in (2, 3), f"version {version}")
    _require(9 <= cluster_bits <= 21, f"cluster_bits {cluster_bits}")
    if version == 2:
        return Fields(*values)
    _require(len(head) >= V3_HEADER_BYTES, "it is too short")
    incompatible, _, autoclear, order, length = _V3_MORE.unpack_from(head, V2_HEADER_BYTES)
    _require(
        V3_HEADER_BYTES <= length <= min(1 << cluster_bits, len(head)) and length % 8 == 0,
        f"header_length {length}",
    )
    compression = head[V3_HEADER_BYTES] if length > V3_HEADER_BYTES else 0
    return replace(
        Fields(*values),
        incompatible=incompatible,
        autoclear=autoclear,
        refcount_order=order,
        header_length=length,
        compression_type=compression,
    )


def read_extensions(head: bytes, fields: Fields) -> dict[int, bytes]:
    """Return the header extensions by type.

    Raises:
        VirtbusError: 422 `header_invalid`: an extension leaves the first cluster, or reaches the
            backing file's name.
    """
    limit = min(fields.cluster_bytes, len(head))
    if fields.backing_file_offset:
        limit = min(limit, fields.backing_file_offset)
    found: dict[int, bytes] = {}
    at = fields.header_length
    while at + 8 <= limit:
        kind, length = struct.unpack_from(">II", head, at)
        if kind == EXT_END:
            return found
        _require(length <= limit - at - 8, f"extension {kind:#x} leaves the header")
        found[kind] = head[at + 8 : at + 8 + length]
        at += 8 + (length + 7) // 8 * 8
    return found


def parse(head: bytes, size_bytes: int) -> ImageHeader:
    """Check the header of a qcow2 file of `size_bytes`.

    `head` is the first 64 KiB of the file, or the complete file if it is smaller.

    Raises:
        VirtbusError: 422 `backing_file`, `data_file`, `encrypted`, `internal_snapshots`, `bitmaps`,
            `dirty`, `corrupt`, `unknown_feature` or `header_invalid`.
    """
    fields = read_fields(head)
    _refuse_dependencies(fields, _backing_file(head, fields))
    for kind in read_extensions(head, fields):
        if kind in _FORBIDDEN_EXTENSIONS:
            refuse(_FORBIDDEN_EXTENSIONS[kind])
    _check_features(fields)
    _check_tables(fields, size_bytes)
    return ImageHeader(ImageFormat.QCOW2, fields.size, fields.cluster_bits, fields.version)


def _refuse_dependencies(fields: Fields, backing_file: str) -> None:
    checks = (
        # A size without an offset counts, too: QEMU accepts a size with offset 0 (IMG-10).
        (fields.backing_file_offset or fields.backing_file_size, "backing_file"),
        (fields.incompatible & DATA_FILE or fields.autoclear & AUTOCLEAR_RAW_DATA, "data_file"),
        (fields.crypt_method, "encrypted"),
        (fields.nb_snapshots, "internal_snapshots"),
        (fields.autoclear & AUTOCLEAR_BITMAPS, "bitmaps"),
        (fields.incompatible & CORRUPT, "corrupt"),
        (fields.incompatible & DIRTY, "dirty"),
    )
    for present, reason in checks:
        if present:
            refuse(reason, backing_file)


def _check_features(fields: Fields) -> None:
    unknown = fields.incompatible & ~_KNOWN_INCOMPATIBLE
    if unknown:
        raise VirtbusError(
            Code.UNSUPPORTED,
            "unknown_feature",
            f"the qcow2 image needs features that virtbus does not know (bits {unknown:#x}); "
            "convert it with 'qemu-img convert -O qcow2 -o compat=1.1'",
        )
    _require(fields.refcount_order <= 6, f"refcount_order {fields.refcount_order}")
    typed = bool(fields.incompatible & COMPRESSION)
    _require(fields.compression_type in (0, 1), f"compression type {fields.compression_type}")
    _require(typed == bool(fields.compression_type), "compression type and feature bit differ")
    if fields.incompatible & EXTENDED_L2:
        _require(fields.cluster_bits >= 14, "extended L2 entries in small clusters")


def _check_tables(fields: Fields, size_bytes: int) -> None:
    cluster = fields.cluster_bytes
    # The last cluster of a file may be short, so the end is rounded up.
    end = (size_bytes + cluster - 1) // cluster * cluster
    _require(fields.size > 0 and fields.size % 512 == 0, f"virtual size {fields.size}")
    entries = cluster // (16 if fields.incompatible & EXTENDED_L2 else 8)
    needed = -(-fields.size // (cluster * entries))
    l1_bytes = fields.l1_size * 8
    _require(l1_bytes <= MAX_L1_BYTES, f"L1 table of {l1_bytes} bytes")
    _require(fields.l1_size >= needed, f"L1 table of {fields.l1_size} entries for its size")
    ref_bytes = fields.refcount_table_clusters * cluster
    _require(0 < ref_bytes <= MAX_REFTABLE_BYTES, f"refcount table of {ref_bytes} bytes")
    tables = (("L1", fields.l1_table_offset, l1_bytes),
              ("refcount", fields.refcount_table_offset, ref_bytes))  # fmt: skip
    for name, offset, length in tables:
        _require(offset % cluster == 0 and offset >= cluster, f"{name} table at {offset}")
        _require(offset + length <= end, f"{name} table beyond the end of the file")
    (_, l1, _), (_, ref, _) = tables
    _require(l1 + l1_bytes <= ref or ref + ref_bytes <= l1, "its tables overlap")
