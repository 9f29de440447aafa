"""The header check: IMG-01 … IMG-12, with real qemu-img files and modified bytes."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.imaged.core import overlay, qcow2
from virtbus.imaged.core.formats import HEAD_BYTES, TAIL_BYTES, claims
from virtbus.imaged.core.header import inspect
from virtbus.imaged.core.qcow2 import ImageHeader
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat

MIB = 1024**2
LIMIT = 2 * 1024**4
needs_qemu_img = pytest.mark.integration


def gate(data: bytes, size: int | None = None, limit: int = LIMIT) -> ImageHeader:
    size = len(data) if size is None else size
    return inspect(data[:HEAD_BYTES], data[-TAIL_BYTES:], size, limit)


def refusal(data: bytes, size: int | None = None, limit: int = LIMIT) -> str:
    with pytest.raises(VirtbusError) as caught:
        gate(data, size, limit)
    assert 400 <= caught.value.code < 500
    return caught.value.reason


def qcow2_bytes(size: int = 64 * MIB) -> bytearray:
    layout = overlay.build(size)
    data = bytearray(layout.length_bytes)
    for offset, piece in layout.pieces:
        data[offset : offset + len(piece)] = piece
    return data


def tampered(offset: int, fmt: str, *values: int) -> bytes:
    data = qcow2_bytes()
    struct.pack_into(fmt, data, offset, *values)
    return bytes(data)


def qemu_img(*arguments: str, cwd: Path) -> None:
    subprocess.run(["qemu-img", *arguments], cwd=cwd, check=True, capture_output=True)


def create(tmp_path: Path, *arguments: str) -> bytes:
    qemu_img("create", "-q", *arguments, cwd=tmp_path)
    return (tmp_path / "x").read_bytes()


@needs_qemu_img
@pytest.mark.parametrize(
    "options",
    [
        ["-o", "compat=1.1"],
        ["-o", "compat=0.10"],
        ["-o", "cluster_size=512"],
        ["-o", "cluster_size=2M"],
        ["-o", "extended_l2=on,cluster_size=128k"],
        ["-o", "compression_type=zstd"],
        ["-o", "lazy_refcounts=on,refcount_bits=1"],
        ["-o", "refcount_bits=64,preallocation=metadata"],
    ],
)
@pytest.mark.parametrize("size", ["512", "1M", "1000M"])
def test_every_plain_qcow2_of_qemu_img_is_accepted(
    tmp_path: Path, options: list[str], size: str
) -> None:
    data = create(tmp_path, "-f", "qcow2", *options, "x", size)
    header = gate(data)
    assert header.format is ImageFormat.QCOW2
    assert header.virtual_size_bytes == {"512": 512, "1M": MIB, "1000M": 1000 * MIB}[size]


@needs_qemu_img
@pytest.mark.parametrize("options", [[], ["-c"], ["-c", "-o", "compression_type=zstd"]])
def test_converted_images_are_accepted(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(300_000) + bytes(MIB))
    qemu_img("convert", "-f", "raw", "-O", "qcow2", *options, "raw", "x", cwd=tmp_path)
    assert gate((tmp_path / "x").read_bytes()).format is ImageFormat.QCOW2


@needs_qemu_img
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-f", "qcow2", "-u", "-b", "/etc/shadow", "-F", "raw", "x", "1M"], "backing_file"),
        (["-f", "qcow2", "-u", "-b", "json:{}", "-F", "raw", "x", "1M"], "backing_file"),
        (["-f", "qcow2", "-u", "-b", "nbd://h/x", "-F", "raw", "x", "1M"], "backing_file"),
        (["-f", "qcow2", "-u", "-b", "../y", "-F", "raw", "x", "1M"], "backing_file"),
        (["-f", "qcow2", "-o", "data_file=d", "x", "1M"], "data_file"),
        (["-f", "qcow2", "-o", "data_file=d,data_file_raw=on", "x", "1M"], "data_file"),
        (["-f", "qed", "x", "1M"], "unlisted_format"),
        (["-f", "vdi", "x", "1M"], "unlisted_format"),
        (["-f", "vpc", "x", "1M"], "unlisted_format"),
        (["-f", "vpc", "-o", "subformat=fixed", "x", "1M"], "unlisted_format"),
        (["-f", "vhdx", "x", "1M"], "unlisted_format"),
        (["-f", "vmdk", "x", "1M"], "unlisted_format"),
        (["-f", "vmdk", "-o", "subformat=monolithicFlat", "x", "1M"], "unlisted_format"),
        (["-f", "vmdk", "-o", "subformat=streamOptimized", "x", "1M"], "unlisted_format"),
        (["-f", "parallels", "x", "1M"], "unlisted_format"),
        (["-f", "qcow", "x", "1M"], "unlisted_format"),
    ],
)  # fmt: skip
def test_images_that_need_more_than_themselves_are_refused(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    assert refusal(create(tmp_path, *arguments)) == reason


@needs_qemu_img
def test_internal_snapshots_and_bitmaps_are_refused(tmp_path: Path) -> None:
    create(tmp_path, "-f", "qcow2", "x", "1M")
    shutil.copy(tmp_path / "x", tmp_path / "y")
    qemu_img("snapshot", "-c", "s", "x", cwd=tmp_path)
    qemu_img("bitmap", "--add", "y", "b", cwd=tmp_path)
    assert refusal((tmp_path / "x").read_bytes()) == "internal_snapshots"
    assert refusal((tmp_path / "y").read_bytes()) == "bitmaps"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (tampered(16, ">I", 0x7FFFFFFF), "backing_file"),  # a size with offset 0
        (tampered(8, ">Q", 200), "backing_file"),
        (tampered(20, ">I", 60), "header_invalid"),
        (tampered(20, ">I", 8), "header_invalid"),
        (tampered(4, ">I", 3), None),
        (tampered(24, ">Q", 0), "header_invalid"),
        (tampered(24, ">Q", 513), "header_invalid"),
        (tampered(24, ">Q", 1024**4), "header_invalid"),  # more than its L1 table covers
        (tampered(32, ">I", 1), "encrypted"),
        (tampered(32, ">I", 2), "encrypted"),
        (tampered(112, ">II", qcow2.EXT_ENCRYPTION, 16), "encrypted"),
        (tampered(36, ">I", 0x7FFFFFFF), "header_invalid"),
        (tampered(40, ">Q", 0), "header_invalid"),
        (tampered(40, ">Q", 65536 + 512), "header_invalid"),
        (tampered(40, ">Q", 65536), "header_invalid"),  # the L1 over the refcount table
        (tampered(40, ">Q", 1 << 62), "header_invalid"),
        (tampered(48, ">Q", 0), "header_invalid"),
        (tampered(48, ">Q", 1 << 40), "header_invalid"),
        (tampered(56, ">I", 0), "header_invalid"),
        (tampered(56, ">I", 0x7FFFFFFF), "header_invalid"),
        (tampered(60, ">I", 0x7FFFFFFF), "internal_snapshots"),
        (tampered(72, ">Q", 1), "dirty"),
        (tampered(72, ">Q", 2), "corrupt"),
        (tampered(72, ">Q", 4), "data_file"),
        (tampered(72, ">Q", 8), "header_invalid"),  # compression bit without a type
        (tampered(72, ">Q", 32), "unknown_feature"),
        (tampered(72, ">Q", 1 << 63), "unknown_feature"),
        (tampered(88, ">Q", 1), "bitmaps"),
        (tampered(88, ">Q", 2), "data_file"),
        (tampered(96, ">I", 7), "header_invalid"),
        (tampered(100, ">I", 100), "header_invalid"),
        (tampered(100, ">I", 105), "header_invalid"),
        (tampered(100, ">I", 1 << 31), "header_invalid"),
        (tampered(104, ">B", 1), "header_invalid"),
        (tampered(112, ">II", qcow2.EXT_DATA_FILE, 8), "data_file"),
        (tampered(112, ">II", qcow2.EXT_BITMAPS, 24), "bitmaps"),
        (tampered(112, ">II", qcow2.EXT_BACKING_FORMAT, 3), "backing_file"),
        (tampered(112, ">II", 0x12345678, 0xFFFFFFFF), "header_invalid"),
        (bytes(qcow2_bytes()[:60]), "header_invalid"),
        (bytes(qcow2_bytes()[:90]), "header_invalid"),
        (bytes(qcow2_bytes()[:65536]), "header_invalid"),  # its tables are cut off
    ],
)
def test_tampered_qcow2_headers_are_refused(data: bytes, reason: str | None) -> None:
    if reason is None:
        assert gate(data).format is ImageFormat.QCOW2
    else:
        assert refusal(data) == reason


def test_a_virtual_size_bomb_is_refused() -> None:
    assert refusal(bytes(qcow2_bytes(63 * 1024**4))) == "virtual_size_too_large"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"QED\0" + bytes(4096), "unlisted_format"),
        # By bytes: qemu-img times its key derivation and fails at it on a busy machine.
        (b"LUKS\xba\xbe\0\1aes" + bytes(4096), "unlisted_format"),
        (b"LUKS\xba\xbe\0\2" + bytes(4096), "unlisted_format"),
        (bytes(3584) + b"conectix" + bytes(504), "unlisted_format"),
        (bytes(4096) + b"conectix" + bytes(503), "unlisted_format"),
        (bytes(3584) + b"koly" + bytes(508), "unlisted_format"),
        (b"# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0\n" * 20, "unlisted_format"),
        (b"\n  # x\n\nVersion = 1\n" * 60, "unlisted_format"),
        (b"<!DOCTYPE html><html>" + bytes(4096), "unlisted_format"),
        (b"\x1f\x8b\x08" + bytes(4096), "unlisted_format"),
        (b"\xfd7zXZ\0" + bytes(4096), "unlisted_format"),
        (b"KDMV" + bytes(506) + b"\x55\xaaEFI PART" + bytes(4096), "unlisted_format"),
        (bytes(511), "header_invalid"),
        (b"", "header_invalid"),
    ],
)  # fmt: skip
def test_data_that_is_neither_qcow2_nor_raw_is_refused(data: bytes, reason: str) -> None:
    assert refusal(data) == reason


def test_polyglots_are_refused() -> None:
    iso = qcow2_bytes()
    iso[0x8001:0x8006] = b"CD001"
    footer = qcow2_bytes()
    footer[-512:-504] = b"conectix"
    gpt = qcow2_bytes()
    gpt[512:520] = b"EFI PART"
    assert [refusal(bytes(data)) for data in (iso, footer, gpt)] == ["ambiguous_format"] * 3
    disc = bytes(0x8001) + b"CD001" + bytes(4096)
    for magic in (b"KDMV", b"QED\0", b"# Disk DescriptorFile", b"vhdxfile"):
        assert refusal(magic + disc[len(magic) :]) == "unlisted_format"


@pytest.mark.parametrize("mark", [b"CD001", b"BEA01"])
@pytest.mark.parametrize("start", [b"", bytes(510) + b"\x55\xaaEFI PART"], ids=["plain", "hybrid"])
def test_an_iso_image_is_raw(start: bytes, mark: bytes) -> None:
    data = start.ljust(0x8001, b"\0") + mark + bytes(4096)
    assert gate(data).format is ImageFormat.RAW


def test_a_raw_disk_with_a_partition_table_is_raw() -> None:
    header = gate(bytes(510) + b"\x55\xaaEFI PART" + bytes(5000))
    assert (header.format, header.virtual_size_bytes) == (ImageFormat.RAW, 5632)


def test_refusals_name_the_next_step() -> None:
    with pytest.raises(VirtbusError, match="qemu-img convert"):
        gate(tampered(8, ">Q", 200))
    with pytest.raises(VirtbusError, match="web page"):
        gate(b"<html>" + bytes(600))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"t.qcow2", "its backing file 't.qcow2'; flatten"),
        (b"a\n\x1b[31m\xff{x}", r"its backing file 'a\n\x1b[31m\\xff{x}'; flatten"),
        (b"y" * 200, f"its backing file '{'y' * 100}…'; flatten"),
        (b"", "another file; flatten"),
    ],
)
def test_a_backing_file_is_named_escaped_and_cut(name: bytes, shown: str) -> None:
    data = qcow2_bytes()
    struct.pack_into(">QI", data, 8, 512, len(name))
    data[512 : 512 + len(name)] = name
    with pytest.raises(VirtbusError) as caught:
        gate(bytes(data))
    assert shown in caught.value.body.message


@given(st.binary(max_size=2048), st.integers(0, 1 << 63))
def test_no_bytes_break_the_gate(data: bytes, size: int) -> None:
    try:
        header = gate(data, size)
    except VirtbusError:
        return
    assert header.virtual_size_bytes <= LIMIT


@given(st.integers(0, 160), st.binary(min_size=1, max_size=16), st.integers(0, 1 << 40))
def test_no_tampered_header_passes_with_a_backing_file(at: int, patch: bytes, size: int) -> None:
    data = qcow2_bytes(MIB)
    data[at : at + len(patch)] = patch
    try:
        header = gate(bytes(data), size)
    except VirtbusError:
        return
    if header.format is ImageFormat.QCOW2:
        fields = qcow2.read_fields(bytes(data))
        assert fields.backing_file_offset == fields.backing_file_size == fields.nb_snapshots == 0
        assert not fields.incompatible & ~(qcow2.COMPRESSION | qcow2.EXTENDED_L2)
    else:
        assert claims(bytes(data[:HEAD_BYTES]), bytes(data[-TAIL_BYTES:])) in {(), ("iso",)}
