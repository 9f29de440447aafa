"""The overlay writer, checked by qemu-img and qemu-io."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.imaged.core.overlay import HEAD_BYTES, Layout, Overlay, build, read_overlay
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat

MIB = 1024**2
needs_qemu_img = pytest.mark.integration


def write(path: Path, layout: Layout) -> Path:
    with path.open("wb") as file:
        for offset, piece in layout.pieces:
            file.seek(offset)
            file.write(piece)
        file.truncate(layout.length_bytes)
    return path


def run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


def info(path: Path) -> dict[str, object]:
    return dict(json.loads(run("qemu-img", "info", "--output=json", str(path))))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.raw"
    path.write_bytes(os.urandom(3 * MIB))
    return path


@needs_qemu_img
@pytest.mark.parametrize("size", [3 * MIB, 3 * MIB + 512, 600 * MIB, 2 * 1024**4, 64 * 1024**4])
def test_overlay_of_larger_size_passes_qemu_img_check(
    base: Path, tmp_path: Path, size: int
) -> None:
    path = write(tmp_path / "o.qcow2", build(size, str(base), ImageFormat.RAW))
    run("qemu-img", "check", str(path))
    seen = info(path)
    assert seen["virtual-size"] == size
    assert seen["full-backing-filename"] == str(base)
    assert seen["backing-filename-format"] == "raw"
    assert seen["format"] == "qcow2"


@needs_qemu_img
@pytest.mark.parametrize("backing", list(ImageFormat))
def test_overlay_reads_as_its_image_and_zeros_beyond(
    base: Path, tmp_path: Path, backing: ImageFormat
) -> None:
    image = tmp_path / "image"
    run("qemu-img", "convert", "-f", "raw", "-O", backing, str(base), str(image))
    path = write(tmp_path / "o.qcow2", build(700 * MIB, str(image), backing))
    run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(path), str(tmp_path / "out"))
    data = (tmp_path / "out").read_bytes()
    assert data[: 3 * MIB] == base.read_bytes()
    assert not any(data[3 * MIB : 4 * MIB])


@needs_qemu_img
def test_overlay_takes_writes_and_leaves_its_image_alone(base: Path, tmp_path: Path) -> None:
    before = base.read_bytes()
    path = write(tmp_path / "o.qcow2", build(600 * MIB, str(base), ImageFormat.RAW))
    for command in ("write -P 7 1M 64k", "write -P 9 550M 1M"):
        run("qemu-io", "-f", "qcow2", "-c", command, str(path))
    out = run(
        "qemu-io", "-f", "qcow2", "-c", "read -P 7 1M 64k", "-c", "read -P 9 550M 1M", str(path)
    )
    assert "Pattern verification failed" not in out
    run("qemu-img", "check", str(path))
    assert base.read_bytes() == before
    assert read_overlay(path.read_bytes()[:HEAD_BYTES]) == Overlay(600 * MIB, str(base), "raw")


@needs_qemu_img
def test_empty_disk_reads_as_zeros(tmp_path: Path) -> None:
    path = write(tmp_path / "e.qcow2", build(10 * MIB))
    run("qemu-img", "check", str(path))
    assert "backing-filename" not in info(path)
    run("qemu-io", "-f", "qcow2", "-c", "read -P 0 0 10M", str(path))


@needs_qemu_img
def test_overlay_of_qemu_img_is_read_back(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "o.qcow2"
    run("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(path), "9M")
    assert read_overlay(path.read_bytes()[:HEAD_BYTES]) == Overlay(9 * MIB, str(base), "raw")


@given(
    st.integers(1, 64 * 1024**4),
    st.text(st.characters(min_codepoint=33, exclude_categories=["Cs"]), min_size=1, max_size=200),
    st.sampled_from(list(ImageFormat)),
)
def test_an_encoded_message_is_decoded_again(size: int, name: str, backing: ImageFormat) -> None:
    layout = build(size, "/" + name, backing)
    found = read_overlay(layout.pieces[0][1])
    assert found == Overlay(-(-size // 512) * 512, "/" + name, backing.value)


@pytest.mark.parametrize("path", ["base", "json:{}", "nbd://x", "/a\nb", "/" + "x" * 1023])
def test_backing_paths_that_are_not_plain_files_are_not_written(path: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        build(MIB, path, ImageFormat.RAW)


@given(st.binary(max_size=600))
def test_no_bytes_break_the_overlay_reader(data: bytes) -> None:
    with pytest.raises(VirtbusError):
        read_overlay(data)
