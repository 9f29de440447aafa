"""Detects the known container formats of a file by its first and last bytes.

Magic numbers are those of QEMU's block drivers (`block/*.c`, the `*_probe` functions), of ECMA-119
for ISO 9660, and of the usual archive formats. `header.inspect` accepts a file as raw only if it
has none of these magic numbers, or only those of an optical disc (IMG-06, IMG-08, IMG-09).
"""

import re

HEAD_BYTES = 64 * 1024
"""Size of the start that `claims` needs: up to the third ISO 9660 volume descriptor."""
TAIL_BYTES = 1024
"""Size of the end that `claims` needs: VHD and DMG have their magic in the last sector."""

QCOW2_MAGIC = b"QFI\xfb"
ARCHIVES = frozenset({"gzip", "xz", "zstd", "bzip2", "zip", "7z", "tar"})

_AT_START = (
    (b"QED\0", "qed"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vhd"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"SEsp", "vmdk"),
    (b"LUKS\xba\xbe", "luks"),
    (b"SKUL\xba\xbe", "luks"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
    (b"koly", "dmg"),
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
)
_AT_OFFSET = (
    (64, b"\x7f\x10\xda\xbe", "vdi"),
    (257, b"ustar", "tar"),
    *(
        (offset, mark, "iso")
        for offset in (0x8001, 0x8801, 0x9001)
        for mark in (b"CD001", b"BEA01")
    ),
)
_VMDK_DESCRIPTOR = re.compile(
    rb"\A(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*version[ \t]*=[ \t]*[0-9]", re.IGNORECASE
)
_HTML = re.compile(
    rb"\A\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE
)


def claims(head: bytes, tail: bytes) -> tuple[str, ...]:
    """Return the names of all known formats whose magic is found, sorted; `()` for plain data.

    `head` is the first `HEAD_BYTES` of the file, and `tail` the last `TAIL_BYTES`.
    """
    found = {name for magic, name in _AT_START if head.startswith(magic)}
    found |= {name for at, magic, name in _AT_OFFSET if head[at : at + len(magic)] == magic}
    if head.startswith(QCOW2_MAGIC):
        found.add("qcow2" if head[4:8] in {b"\0\0\0\x02", b"\0\0\0\x03"} else "qcow")
    # The footer of a VHD is the last 512 bytes. Very old programs wrote a footer of 511 bytes.
    if b"conectix" in {tail[-512:-504], tail[-511:-503]}:
        found.add("vhd")
    if tail[-512:-508] == b"koly":
        found.add("dmg")
    text = head[:4096]
    if _VMDK_DESCRIPTOR.match(text) or b"# disk descriptorfile" in text.lower():
        found.add("vmdk")
    if _HTML.match(text):
        found.add("html")
    return tuple(sorted(found))


def has_partition_table(head: bytes) -> bool:
    """Return True if sector 0 has an MBR or sector 1 has a GPT.

    This is normal for a raw image, but not for a qcow2 file.
    """
    return head[510:512] == b"\x55\xaa" or head[512:520] == b"EFI PART"
