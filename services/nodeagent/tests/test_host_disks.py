"""Files of the node that are disks: which are opened, and which are made."""

import os
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.host_disks import open_disk
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.volume_ref import HostDisk

MIB = 2**20


def opened(root: Path, path: Path, capacity: int | None = None, *, readonly: bool = False) -> int:
    """Open and close a disk; return the size of its file."""
    disk = HostDisk(path=str(path), capacity=capacity)
    descriptor = open_disk(str(root), disk, readonly=readonly)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def test_a_disk_is_made_once_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    assert opened(tmp_path, path, 4 * MIB) == 4 * MIB
    assert path.stat().st_blocks < 16, "it is sparse"
    path.write_bytes(b"x" * MIB)
    assert opened(tmp_path, path, 8 * MIB) == MIB, "a capacity never changes a disk"
    assert opened(tmp_path, path) == MIB
    path.write_bytes(b"")  # an agent died between the two steps
    assert opened(tmp_path, path, 4 * MIB) == 4 * MIB


def test_only_a_plain_file_with_one_name_below_the_directory_is_a_disk(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    (root / "folder").mkdir(parents=True)
    secret.write_bytes(b"x" * MIB)
    (root / "link").symlink_to(secret)
    (root / "away").symlink_to(tmp_path)
    os.link(secret, root / "second")
    os.mkfifo(root / "pipe")
    (root / "empty").touch()
    for path, why in {
        "gone": "cannot be opened",
        "link": "cannot be opened",
        "away/secret": "links are not followed",
        "second": "no plain file",
        "pipe": "no plain file",
        "folder": "cannot be opened",
        "empty": "give a capacity",
    }.items():
        with pytest.raises(VirtbusError, match=why):
            opened(root, root / path)
    with pytest.raises(VirtbusError, match="name a file below it"):
        opened(root, root, MIB)
    for path in ("link", "away/new"):
        with pytest.raises(VirtbusError):
            opened(root, root / path, MIB)
    assert not (tmp_path / "new").exists()
    assert secret.read_bytes() == b"x" * MIB


def test_a_readonly_disk_is_not_made_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with pytest.raises(VirtbusError, match="cannot be opened"):
        opened(tmp_path, path, MIB, readonly=True)
    path.write_bytes(b"x" * MIB)
    descriptor = open_disk(str(tmp_path), HostDisk(path=str(path)), readonly=True)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"y")
    finally:
        os.close(descriptor)
