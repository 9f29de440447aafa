"""Checks the header of every image, and determines its format from its bytes only."""

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.formats import ARCHIVES, claims, has_partition_table
from virtbus.imaged.core.qcow2 import ImageHeader
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.quantity import format_bytes

SECTOR_BYTES = 512


def inspect(head: bytes, tail: bytes, size_bytes: int, max_virtual_bytes: int) -> ImageHeader:
    """Return the header of an image that may be used.

    `head` and `tail` are as in `formats.claims`; `size_bytes` is the size of the complete file. A
    file is raw if it has no magic number of a known format. An optical disc's file (ISO 9660, UDF)
    is raw as well.

    Raises:
        VirtbusError: 413 `virtual_size_too_large`. 422 `unlisted_format`, `ambiguous_format`,
            `header_invalid`. The errors of `qcow2.parse`.
    """
    names = claims(head, tail)
    if names in {(), ("iso",)}:
        header = _raw(size_bytes)
    elif names == ("qcow2",) and not has_partition_table(head):
        header = qcow2.parse(head, size_bytes)
    elif "qcow2" in names:
        others = [name for name in names if name != "qcow2"] or ["a partition table"]
        raise VirtbusError(
            Code.UNSUPPORTED,
            "ambiguous_format",
            f"the image is qcow2 and {' and '.join(others)} at once; "
            "build a clean one with 'qemu-img convert -O qcow2'",
        )
    else:
        raise _unlisted(names)
    check_virtual_size(header.virtual_size_bytes, max_virtual_bytes)
    return header


def check_virtual_size(virtual_size_bytes: int, max_virtual_bytes: int) -> None:
    """Raise 413 `virtual_size_too_large` if a disk is larger than the limit."""
    if virtual_size_bytes > max_virtual_bytes:
        raise VirtbusError(
            Code.TOO_LARGE,
            "virtual_size_too_large",
            f"the image claims a disk of {format_bytes(virtual_size_bytes)}; at most "
            f"{format_bytes(max_virtual_bytes)} are allowed (setting max_virtual_bytes)",
        )


def _raw(size_bytes: int) -> ImageHeader:
    if size_bytes < SECTOR_BYTES:
        raise VirtbusError(
            Code.UNSUPPORTED,
            "header_invalid",
            f"the image has only {size_bytes} bytes, less than a disk sector; "
            "check what its source delivers",
        )
    # QEMU pads a raw file to whole sectors.
    return ImageHeader(ImageFormat.RAW, -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES)


def _unlisted(names: tuple[str, ...]) -> VirtbusError:
    what = " and ".join(names)
    if "html" in names:
        step = "its source answers with a web page; use the address of the image file itself"
    elif ARCHIVES & set(names):
        step = "unpack it first and offer the image inside"
    else:
        step = "convert it with 'qemu-img convert -O qcow2'"
    return VirtbusError(
        Code.UNSUPPORTED,
        "unlisted_format",
        f"the image is {what}; only qcow2 and raw are accepted: {step}",
    )
