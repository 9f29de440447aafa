"""Copies of disks: the same bytes, the same holes, and no program that writes meanwhile."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from virtbus.imaged.edge.disk_copy import DiskCopy, lock_disk
from virtbus.schemas.errors import VirtbusError

MIB = 1024**2


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("places", [(), (0,), (5 * MIB,), (MIB, 100 * MIB)])
def test_a_copy_has_the_same_bytes_and_holes(tmp_path: Path, places: tuple[int, ...]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for place in places:
            file.seek(place)
            file.write(b"data" * 100)
        file.truncate(200 * MIB)
    with opened(source) as one, opened(target, os.O_RDWR | os.O_CREAT) as other:
        copy = DiskCopy(one, other)
        done = 0
        while step := copy.step():
            done += step
    assert subprocess.run(["cmp", source, target], check=False).returncode == 0
    assert target.stat().st_blocks <= source.stat().st_blocks + 8
    assert done <= source.stat().st_blocks * 512


@pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io")
def test_qemu_cannot_open_a_disk_that_is_copied(tmp_path: Path) -> None:
    disk = tmp_path / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", disk, "8M"], check=True)
    write = ["qemu-io", "-f", "qcow2", "-c", "write 0 64k", str(disk)]
    with opened(disk) as descriptor:
        lock_disk(descriptor)
        with opened(disk) as other:
            lock_disk(other)  # two copies may read one disk
        done = subprocess.run(write, check=False, capture_output=True, text=True)
        assert "lock" in done.stdout + done.stderr
    done = subprocess.run(write, check=False, capture_output=True, text=True)
    assert "wrote" in done.stdout


@pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io")
def test_a_disk_that_qemu_uses_is_not_copied(tmp_path: Path) -> None:
    disk = tmp_path / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", disk, "8M"], check=True)
    pipe = subprocess.PIPE
    run = ["qemu-io", "-f", "qcow2", str(disk)]
    with subprocess.Popen(run, stdin=pipe, stdout=pipe) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(b"write 0 64k\n")
        writer.stdin.flush()
        while b"ops" not in writer.stdout.readline():
            pass
        with opened(disk) as descriptor, pytest.raises(VirtbusError) as refused:
            lock_disk(descriptor)
        assert refused.value.reason == "disk_in_use"
        writer.stdin.close()
