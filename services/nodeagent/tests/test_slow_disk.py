"""A disk that takes seconds for each sync: the node's heartbeat continues (F29)."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.nodeagent.edge import atomic_file, seed_iso
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.schemas import subjects
from virtbus.schemas.network import InterfaceStatus

SYNC_S = 1.5


async def test_a_node_with_a_hung_disk_keeps_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    revisions: list[int] = []
    async with node.agent():
        real = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(SYNC_S)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", slow)
        monkeypatch.setattr(os, "fdatasync", slow)
        begun = time.monotonic()
        for number in range(1, 9):  # more than there are threads
            await node.put(record(number))

        async def beats() -> bool:
            entry = await node.bus.get(subjects.node_record(NODE))
            if entry is not None and entry.revision not in revisions:
                revisions.append(entry.revision)
            return len(revisions) >= 10

        await eventually(beats)
        assert time.monotonic() - begun < SYNC_S
        assert ("start", uid(1)) not in node.domains.done
        monkeypatch.undo()


@pytest.mark.parametrize("again", [False, True])
async def test_a_seed_that_a_slow_disk_still_writes_does_not_outlive_the_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    node = Node(tmp_path)
    writing, go_on = threading.Event(), threading.Event()
    real = atomic_file.replace

    def slow(*of: Any, **how: Any) -> None:
        if not writing.is_set():
            writing.set()
            go_on.wait(10)
        real(*of, **how)

    monkeypatch.setattr(seed_iso, "replace", slow)
    drive = {"name": "seed", "cloud_init_no_cloud": {"hostname": "web"}}
    wanted = record(spec={"volumes": [drive]})

    async def in_state(state: str) -> bool:
        return await node.state(wanted.uid) == state

    await node.join()
    async with node.agent():
        await node.put(wanted)
        await eventually(writing.is_set)
        if again:  # a second preparation, which is not that slow
            await node.put(wanted.model_copy(update={"powered": False, "power_epoch": 1}))
            await eventually(lambda: in_state("Stopped"))
            wanted = wanted.model_copy(update={"powered": True, "power_epoch": 2})
            await node.put(wanted)
            await eventually(lambda: in_state("Running"))
        await node.put(wanted.model_copy(update={"deleting": True}))
        await eventually(lambda: in_state("Deleting"))
        await asyncio.sleep(0.1)  # enough for a release that does not wait for the thread
        go_on.set()

        async def released() -> bool:
            status = await node.status(wanted.uid)
            return status is not None and status.released

        await eventually(released)
        await asyncio.sleep(0.1)  # and for an abandoned thread
        assert list(node.files.vms.iterdir()) == []


async def test_a_late_seed_replaces_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, real = threading.Event(), threading.Event(), atomic_file.replace

    def slow(*of: Any, **how: Any) -> None:
        if not begun.is_set():
            begun.set()
            go_on.wait(10)
        real(*of, **how)

    monkeypatch.setattr(seed_iso, "replace", slow)
    drive = {"name": "seed", "cloud_init_no_cloud": {"hostname": "web"}}
    wanted, seeds = record(spec={"volumes": [drive]}), seed_iso.SeedIsos(tmp_path)
    path = seeds.paths(wanted)["seed"]

    async def write(mac: str) -> None:
        await seeds.write(wanted, None, (InterfaceStatus(name="net0", mac=mac),))

    async with asyncio.TaskGroup() as group:
        hung = group.create_task(write("02:00:00:00:00:01"))
        await eventually(begun.is_set)
        hung.cancel()
        await write("02:00:00:00:00:02")
        newer = path.read_bytes()
        go_on.set()
    assert path.read_bytes() == newer
    assert list(path.parent.iterdir()) == [path]


async def test_a_cancelled_caller_ends_when_its_thread_has() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(10)
        done.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(in_thread(work))
        await eventually(begun.is_set)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        go_on.set()
    assert task.cancelled()
    assert done.is_set()
