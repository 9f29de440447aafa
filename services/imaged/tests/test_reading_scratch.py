"""Files for what a guest overwrites while it is read: empty, bounded by the disk, and removed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from services.imaged.tests.records import uid
from services.imaged.tests.site_under_test import MIB

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.core.overlay import HEAD_BYTES, read_overlay
from virtbus.imaged.edge.backup_staging import BackupStaging
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.reading_scratch import ReadingScratch
from virtbus.schemas.backup import BackupDisk, ScratchWork
from virtbus.schemas.errors import VirtbusError


def work(**more: object) -> ScratchWork:
    disks = [{"name": "root", "size_bytes": 8 * MIB}]
    return ScratchWork.model_validate({"id": uid(1), "disks": disks, **more})


def scratch(tmp_path: Path, limits: SpaceLimits, threads: DiskThreads) -> ReadingScratch:
    return ReadingScratch(BackupStaging(tmp_path), DiskSpace(tmp_path, limits), threads)


async def test_files_are_staged_again_kept_and_removed(tmp_path: Path) -> None:
    threads = DiskThreads()
    made = scratch(tmp_path, SpaceLimits(0, 0.0), threads)
    file = tmp_path / "backups" / uid(1) / "root.qcow2"
    for _ in range(2):
        state = await made.do(work(stage=True))
        assert (state.state, state.step) == ("working", "serve")
        found = read_overlay(file.read_bytes()[:HEAD_BYTES])
        assert (found.virtual_size_bytes, found.backing_path) == (8 * MIB, "")
        file.write_bytes(file.read_bytes() + b"written by QEMU")
        await made.do(work())
        assert file.read_bytes().endswith(b"written by QEMU")
    for _ in range(2):
        assert (await made.do(work(do="cancel"))).state == "none"
        assert not list(tmp_path.iterdir())
    threads.close()


async def test_a_full_disk_is_told(tmp_path: Path) -> None:
    threads = DiskThreads()
    made = scratch(tmp_path, SpaceLimits(2**62, 0.0), threads)
    with pytest.raises(VirtbusError) as error:
        await made.do(work())
    assert error.value.reason == "disk_full"
    assert (await made.do(work(do="cancel"))).state == "none"
    threads.close()


def test_a_reading_may_begin_while_another_one_ends(tmp_path: Path) -> None:
    disks = [BackupDisk(name="root", virtual_size_bytes=8 * MIB)]

    def begin_and_end(number: int) -> None:
        staging = BackupStaging(tmp_path)
        for _ in range(200):
            staging.make(uid(number), disks)
            staging.remove(uid(number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(begin_and_end, range(1, 5)))
    assert not list(tmp_path.iterdir())
