"""Truncated qcow2 files: every cluster in their tables must exist."""

import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.imaged.tests.site_under_test import MIB, NodeMaker, Web

from virtbus.imaged.core import clusters, overlay, qcow2
from virtbus.imaged.core.clusters import check_clusters
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref

needs_qemu_img = pytest.mark.integration
OPTIONS = [
    ["-o", "compat=1.1"],
    ["-o", "compat=0.10"],
    ["-o", "cluster_size=512"],
    ["-o", "cluster_size=2M"],
    ["-o", "extended_l2=on,cluster_size=128k"],
    ["-o", "preallocation=metadata"],
    ["-c"],
    ["-c", "-o", "compression_type=zstd"],
    ["-c", "-o", "extended_l2=on,cluster_size=128k"],
]


def converted(tmp_path: Path, *options: str) -> bytes:
    """A qcow2 of 20 MiB and a sector, with 3 MiB of text in the middle and at the end."""
    text = b"".join(b"line %d of the disk\n" % n for n in range(80_000))
    raw = bytearray(20 * MIB + 512)
    raw[5 * MIB : 5 * MIB + len(text)] = text
    raw[-1000:] = text[-1000:]
    (tmp_path / "raw").write_bytes(raw)
    command = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, "raw", "x"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return (tmp_path / "x").read_bytes()


def check(data: bytes) -> None:
    check_clusters(
        qcow2.read_fields(data[:65536]), len(data), lambda at, length: data[at : at + length]
    )


def refusal(data: bytes) -> str:
    with pytest.raises(VirtbusError) as caught:
        check(data)
    return caught.value.reason


@needs_qemu_img
@pytest.mark.parametrize("options", OPTIONS)
def test_whole_images_are_accepted_and_cut_ones_refused(tmp_path: Path, options: list[str]) -> None:
    data = converted(tmp_path, *options)
    check(data)
    cluster = qcow2.read_fields(data[:65536]).cluster_bytes
    for cut in (len(data) // 2, len(data) - 2 * cluster):
        if cut > 4 * cluster:
            assert refusal(data[:cut]) == "truncated"


@needs_qemu_img
async def test_a_cut_image_is_refused_by_the_pull_with_the_next_step(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    data = converted(tmp_path)
    server.files["cut.qcow2"] = data[: len(data) // 2]
    server.files["whole.qcow2"] = data
    async with make_node() as node:
        with pytest.raises(VirtbusError, match=r"cut short.*fetch or build it again") as caught:
            await node.images.ensure(parse_image_ref(server.url("cut.qcow2")))
        assert (caught.value.code, caught.value.reason) == (422, "truncated")
        assert node.tree() == []
        await node.images.ensure(parse_image_ref(server.url("whole.qcow2")))


def with_l1(*entries: int, size: int = 1024**4) -> bytes:
    layout = overlay.build(size)
    data = bytearray(layout.length_bytes)
    for offset, piece in layout.pieces:
        data[offset : offset + len(piece)] = piece
    at = qcow2.read_fields(bytes(data)).l1_table_offset
    struct.pack_into(f">{len(entries)}Q", data, at, *entries)
    return bytes(data)


def test_tables_outside_the_file_or_its_clusters_are_refused() -> None:
    assert refusal(with_l1(1 << 40)) == "truncated"
    assert refusal(with_l1(65536 + 512)) == "header_invalid"


def test_hostile_tables_cost_a_bounded_read() -> None:
    entries = [(1 + n) << 16 for n in range(2000)]
    data = with_l1(*entries, *entries)
    size, read = 1 << 40, 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal read
        read += length
        return data[offset : offset + length]

    check_clusters(qcow2.read_fields(data), size, read_at)
    assert read <= clusters.MAX_L2_BYTES + qcow2.MAX_L1_BYTES


def test_a_cluster_of_zeros_need_not_exist() -> None:
    data = with_l1(len(with_l1(0)))
    check(data + struct.pack(">Q", (1 << 40) | 1).ljust(65536, b"\0"))
    assert refusal(data + struct.pack(">Q", 1 << 40).ljust(65536, b"\0")) == "truncated"


@given(st.binary(min_size=8, max_size=512), st.integers(0, 1 << 62))
def test_no_tables_break_the_check(table: bytes, size: int) -> None:
    try:
        check_clusters(qcow2.read_fields(with_l1(0)), size, lambda _at, length: table[:length])
    except VirtbusError as error:
        assert error.reason in {"truncated", "header_invalid"}  # noqa: PT017  # either may come
