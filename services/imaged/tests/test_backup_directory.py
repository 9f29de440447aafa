"""The backup directory may be a server that hangs, is full of files, or has another author."""

import asyncio
import threading
from pathlib import Path

import pytest
from services.imaged.tests.records import empty, record
from services.imaged.tests.site_under_test import MIB
from services.imaged.tests.test_service import serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged.edge.backup_files import BackupFiles
from virtbus.schemas.backup import BackupsAsk, HeldBackups


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
