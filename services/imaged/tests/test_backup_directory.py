"""The backup directory may be a server that hangs, is full of files, or has another author."""

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from services.imaged.tests.records import empty, record, uid
from services.imaged.tests.site_under_test import MIB
from services.imaged.tests.test_service import serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.backup_files import BackupFiles, expire
from virtbus.schemas.backup import BackupManifest, BackupsAsk, HeldBackup, HeldBackups
from virtbus.schemas.errors import VirtbusError


@pytest.fixture
def files(tmp_path: Path) -> BackupFiles:
    (tmp_path / "server").mkdir()
    return BackupFiles(tmp_path / "disks", tmp_path / "server")


async def test_a_vm_gets_its_disks_while_the_backup_directory_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, hung = threading.Event(), threading.Semaphore(0)

    def page(files: BackupFiles, after: str) -> HeldBackups:
        del files, after
        hung.release()
        alive.wait(30)
        return HeldBackups()

    monkeypatch.setattr(BackupFiles, "page", page)
    (tmp_path / "server").mkdir()
    knobs = {"backup_dir": tmp_path / "server"}
    async with serving(tmp_path, MemoryServer(), **knobs) as desk, asyncio.TaskGroup() as group:
        try:
            for _ in range(8):
                group.create_task(desk.ask("backups", BackupsAsk(), 30))
            for _ in range(8):
                assert await asyncio.to_thread(hung.acquire, timeout=5)
            await desk.put(record(empty(MIB)))
            assert (await desk.ready()).error is None
        finally:
            alive.set()


def put(files: BackupFiles, number: int, **more: object) -> Path:
    """Write the manifest of a complete backup, as a stranger can; return it."""
    made = {"id": uid(number), "namespace": "default", "name": "web", "uid": uid(1), "node": "n1"}
    path = files.root / uid(number) / "backup.json"
    path.parent.mkdir()
    path.write_text(json.dumps(made | {"created_ns": number, "spec": {"cpus": 2}} | more))
    return path


def test_the_second_list_reads_no_manifest(
    files: BackupFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, 10)
    put(files, 11, parent=uid(10))
    read, names = openat2.read_small, []

    def read_small(name: str, directory: int, max_bytes: int) -> bytes:
        names.append(name)
        return read(name, directory, max_bytes)

    monkeypatch.setattr(openat2, "read_small", read_small)
    first = files.page("")
    assert [one.children for one in first.items] == [(uid(11),), ()]
    assert names.count("backup.json") == 2
    assert files.page("") == first
    assert names.count("backup.json") == 2
    found = files.held(uid(11))
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.spec == {"cpus": 2}
    assert names.count("backup.json") == 3
    assert files.remove(uid(11))
    assert [one.children for one in files.page("").items] == [()]


def test_remains_that_cannot_be_removed_keep_no_other(files: BackupFiles) -> None:
    (files.root / f".part-{uid(10)}" / "a folder").mkdir(parents=True)
    (files.root / f".part-{uid(11)}").mkdir()
    (files.root / f".gone-{uid(12)}").mkdir()
    (files.staging.root / uid(13)).mkdir(parents=True)
    removed = [f".part-{uid(11)}", f".gone-{uid(12)}", uid(13)]
    assert expire(files.staging, files, -1.0, ()) == removed
    files.root.rename(files.root.with_name("other"))
    files.root.write_text("not a directory")
    (files.staging.root / uid(13)).mkdir()
    assert expire(files.staging, files, -1.0, ()) == [uid(13)]


def test_a_part_stays_while_its_guest_is_written(files: BackupFiles) -> None:
    made = {"id": uid(10), "namespace": "default", "name": "web", "uid": uid(1), "node": "n1"}
    files.begin(BackupManifest.model_validate(made | {"created_ns": 1}))
    part = files.root / f".part-{uid(10)}"
    for path in (part, part / "draft.json"):
        os.utime(path, (1, 1))
    assert files.keep(uid(10))
    assert expire(files.staging, files, 3600.0, ()) == []
    os.utime(part, (1, 1))
    assert expire(files.staging, files, 3600.0, ()) == [part.name]
    assert not files.keep(uid(10))


@pytest.mark.parametrize(
    "forged", [{"parent": "../elsewhere"}, {"remark": "x" * 2001}, {"bitmap": "x" * 65}]
)
def test_a_forged_manifest_is_unreadable(files: BackupFiles, forged: dict[str, str]) -> None:
    put(files, 10, **forged)
    with pytest.raises(VirtbusError) as caught:
        files.chain(uid(10))
    assert caught.value.reason == "backup_unreadable"
    assert files.page("").items == (HeldBackup(id=uid(10)),)
