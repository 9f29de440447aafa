"""A transfer that is cancelled while its part is opened leaves nothing, and loses nothing."""

import asyncio
import contextlib
import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.core.links import PartNote
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.partial_downloads import open_part
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.errors import VirtbusError

URL = "https://example.org/i.qcow2"


@pytest.mark.parametrize("abandoned", [True, False], ids=["abandoned", "the service stops"])
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "of an earlier process"])
async def test_a_part_that_is_cancelled_while_it_is_opened(
    tmp_path: Path, *, abandoned: bool, earlier: bool
) -> None:
    if earlier:
        with contextlib.closing(
            ImageStore(tmp_path, SpaceLimits(min_free_bytes=0), checkpoint_bytes=1)
        ) as store:
            before = store.part(URL)
            before.restart(PartNote(url=URL))
            before.write(b"some bytes")
            before.close(keep=True)
    opening, go_on = threading.Event(), threading.Event()

    class SlowStore(ImageStore):
        def part(self, key: str) -> PartialDownload:
            opening.set()
            go_on.wait(10)
            return super().part(key)

    slow = SlowStore(tmp_path, SpaceLimits(0))

    async def transfer() -> None:
        async with open_part(slow, DiskThreads(), URL, lambda: abandoned):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(transfer())
        await asyncio.to_thread(opening.wait, 10)
        task.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
    assert task.cancelled()
    kept = earlier and not abandoned
    assert len(list((tmp_path / "part").iterdir())) == (2 if kept else 0)
    slow.close()


@pytest.mark.parametrize(
    ("module", "call"), [(os, "fdatasync"), (openat2, "replace"), (os, "ftruncate")]
)
async def test_a_full_disk_is_told_as_such_also_when_a_part_is_kept_or_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.closing(ImageStore(tmp_path, SpaceLimits(0))) as store:
        part = store.part(URL)
        part.restart(PartNote(url=URL))
        part.write(b"some bytes")
        monkeypatch.setattr(module, call, full)
        step = (
            partial(part.restart, None) if call == "ftruncate" else partial(part.close, keep=True)
        )
        with pytest.raises(VirtbusError) as caught:
            step()
        assert caught.value.reason == "disk_full"
        monkeypatch.undo()
        part.close(keep=False)
