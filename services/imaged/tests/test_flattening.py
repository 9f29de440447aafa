"""Disks that leave their layers keep their content, and a merge can end at any instant."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import record, uid, volume
from services.imaged.tests.site_under_test import FAST, MIB, Node, NodeMaker, Web
from services.imaged.tests.test_layered_snapshots import layered, layers
from services.imaged.tests.test_snapshots import (
    DISKS,
    OF,
    VM,
    ended,
    files,
    refused,
    snapshots,
    vm,
    work,
)

from virtbus.imaged.core.limits import SpaceLimits, TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.edge import openat2, storage_daemon
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.imaged.edge.flatten_job import flatten
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.flattening import Flattener, Flattening, FlattenParts
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.snapshot import SnapshotDisk

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io"),
]


@contextlib.asynccontextmanager
async def flattening(
    node: Node,
    threads: DiskThreads,
    space: SpaceLimits | None = None,
    flattener: Flattener = flatten,
) -> AsyncIterator[Flattening]:
    parts = FlattenParts(
        node.disks.locks,
        DiskPlaces(Pools(node.files), node.store),
        DiskSpace(node.files.root, space or SpaceLimits(0, 0.0)),
        threads,
        FAST,
    )
    async with asyncio.TaskGroup() as group:
        yield Flattening(DiskJobs(group), parts, flattener)


def merge(number: int = 50, **more: Any) -> FlattenWork:
    fields: dict[str, Any] = {"id": uid(number), "uid": VM, "name": "web", "disks": DISKS}
    return FlattenWork.model_validate(fields | more)


async def merged(made: Flattening, want: FlattenWork) -> WorkState:
    while (state := await made.do(want)).state == "working":
        assert state.done_bytes <= state.total_bytes
        await asyncio.sleep(0.01)
    return state


def io(path: Path, *commands: str) -> None:
    told = [word for command in commands for word in ("-c", command)]
    done = subprocess.run(["qemu-io", "-f", "qcow2", *told, path], check=True, capture_output=True)
    assert b"fail" not in done.stdout


def backing(path: Path) -> str:
    told = subprocess.run(
        ["qemu-img", "info", "--output=json", path], check=True, capture_output=True
    )
    return str(json.loads(told.stdout).get("backing-filename", ""))


def sound(path: Path) -> None:
    subprocess.run(["qemu-img", "check", "-q", path], check=True)


async def on_layers(node: Node, threads: DiskThreads) -> None:
    """Disks with three layers each, all of which have some of the content."""
    await node.disks.ensure(vm())
    async with snapshots(node, threads) as made:
        for number, pattern in enumerate((0x11, 0x22, 0x33)):
            for path in files(node):
                io(path, f"write -P {pattern} {number}M 1M", f"write -P {pattern} 4M 64k")
            await ended(made, layered(10 + number))
        for path in files(node):
            io(path, "write -z 1M 64k")


def whole(path: Path) -> None:
    """It has the content of all layers."""
    io(path, "read -P 0x11 0 1M", "read -P 0 1M 64k", "read -P 0x22 1088k 64k")
    io(path, "read -P 0x33 2M 1M", "read -P 0x33 4M 64k", "read -P 0 5M 1M")


async def test_disks_leave_their_layers_with_all_content(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await on_layers(node, threads)
        async with flattening(node, threads) as made:
            assert await refused(merged(made, merge(may_begin=False))) == "disk_in_use"
            assert (await merged(made, merge())).state == "done"
            assert (await merged(made, merge(51))).state == "done"  # there is nothing to do
        for path in files(node):
            assert backing(path) == ""
            sound(path)
            whole(path)
        for layer in layers(node, 12):
            io(layer, "read -P 0x33 4M 64k")
        disks = (await node.disks.ensure(vm())).ready.disks
        assert all(disk.layers == () for disk in disks.values())
        async with snapshots(node, threads) as made:  # layers are as before
            await ended(made, work(20, 11))
        io(files(node)[0], "read -P 0x22 4M 64k")


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in with_children(int(child)))]


async def test_a_daemon_that_dies_right_after_its_merge_loses_nothing(
    make_node: NodeMaker, threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = storage_daemon._say

    async def say_or_kill(process: asyncio.subprocess.Process, command: str, *rest: Any) -> None:
        if command == "quit":
            for pid in with_children(process.pid):
                os.kill(pid, signal.SIGKILL)
        else:
            await say(process, command, *rest)

    monkeypatch.setattr(storage_daemon, "_say", say_or_kill)
    async with make_node() as node:
        await on_layers(node, threads)
        async with flattening(node, threads) as made:
            assert await refused(merged(made, merge())) == "copy_failed"
        path = files(node)[0]
        assert backing(path) == ""
        sound(path)
        whole(path)


async def test_a_disk_of_an_image_rests_on_the_image_only(
    make_node: NodeMaker, threads: DiskThreads, server: Web, tmp_path: Path
) -> None:
    image = tmp_path / "image.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "8M"], check=True)
    io(image, "write -P 0x77 6M 1M")
    server.files["image"] = image.read_bytes()
    one = record(volume(f"{server.base}/image", 8 * MIB), uid=VM)
    disk = (SnapshotDisk(name="root"),)
    async with make_node() as node:
        await node.disks.ensure(one)
        path = node.state / "disks" / VM / "root.qcow2"
        before = backing(path)
        assert before.startswith(str(node.state / "images"))
        async with snapshots(node, threads) as made:
            for number in (10, 11):
                io(path, f"write -P {number} {number - 10}M 1M")
                await ended(made, layered(number, disks=disk))
        async with flattening(node, threads) as made:
            assert (await merged(made, merge(disks=disk))).state == "done"
        assert backing(path) == before
        sound(path)
        io(path, "read -P 10 0 1M", "read -P 11 1M 1M", "read -P 0x77 6M 1M")
        assert path.stat().st_blocks * 512 < 4 * MIB  # the image was not copied
        ready = (await node.disks.ensure(one)).ready
        assert ready.disks["root"].layers == ()
        assert ready.digest


async def test_a_merge_that_is_cancelled_leaves_a_sound_disk_and_may_be_repeated(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    began = asyncio.Event()

    async def stops(
        source: ExportSource,
        image: Path | None,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
    ) -> None:
        async def hold() -> None:
            await look()
            began.set()
            await asyncio.Event().wait()

        await flatten(source, image, limits, hold)

    async with make_node() as node:
        await on_layers(node, threads)
        async with flattening(node, threads, flattener=stops) as made:
            assert (await made.do(merge())).state == "working"
            await began.wait()
            assert (await made.do(merge(do="cancel"))).state == "none"
        for path in files(node):
            sound(path)
            whole(path)
        async with flattening(node, threads, SpaceLimits(2**62, 0.0)) as made:
            assert await refused(merged(made, merge())) == "disk_full"
        async with flattening(node, threads) as made:
            assert (await merged(made, merge())).state == "done"
        for path in files(node):
            whole(path)
    assert OF.folder


def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the disks to QEMU's user."""
    read_small, disks = openat2.read_small, {"own.qcow2", "disk.qcow2"}

    def read(name: str, directory: int, limit: int) -> bytes:
        if name in disks:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_small(name, directory, limit)

    monkeypatch.setattr(openat2, "read_small", read)


@pytest.fixture
def own_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """imaged is not root; a call of the result gives the disks to QEMU's user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return lambda: hidden(monkeypatch)


async def test_what_the_qemu_of_a_guest_has_merged_is_noted_at_once(
    make_node: NodeMaker, threads: DiskThreads, own_user: Callable[[], None]
) -> None:
    """The headers of its disks cannot be read, and the agent compares them with these notes."""
    async with make_node() as node:
        await node.disks.ensure(vm())
        async with snapshots(node, threads) as made:
            for number in (10, 11):
                await ended(made, layered(number))
        own_user()

        async def rest() -> set[str]:
            found = (await node.disks.ensure(vm())).ready.disks
            return {name for name, disk in found.items() if disk.layers}

        inodes = {
            disk.name: path.stat().st_ino for disk, path in zip(DISKS, files(node), strict=True)
        }
        async with flattening(node, threads) as made_live:
            others = dict.fromkeys(inodes, 1)  # a snapshot has put others there since
            assert (await made_live.do(merge(live=True, merged=others))).state == "done"
            assert await rest() == {"own", "data"}
            one = merge(live=True, merged={"own": inodes["own"]}, disks=DISKS[:1])
            assert (await made_live.do(one)).state == "done"
            assert await rest() == {"data"}
            assert (await made_live.do(merge(live=True, merged=inodes))).state == "done"
            assert (await made_live.do(merge(live=True, merged=inodes))).state == "done"
        assert await rest() == set()


async def test_a_running_guest_needs_the_space_of_all_its_layers_before_the_first_copy(
    make_node: NodeMaker, threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(DiskSpace, "check_room", lambda _, more_bytes: asked.append(more_bytes))
    async with make_node() as node:
        await on_layers(node, threads)
        asked.clear()
        async with flattening(node, threads) as made:
            assert (await made.do(merge(live=True, whole=True))).state == "working"
            assert (await made.do(merge(live=True))).state == "working"
        used = sum(path.stat().st_blocks for n in (10, 11, 12) for path in layers(node, n)) * 512
    assert asked == [used, 0]
    assert used > 4 * MIB


async def test_a_disk_that_a_qemu_has_is_left_alone(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await on_layers(node, threads)
        path = files(node)[0]
        command = ["qemu-io", "-f", "qcow2", str(path)]
        pipe = asyncio.subprocess.PIPE
        guest = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert guest.stdin is not None
        assert guest.stdout is not None
        guest.stdin.write(b"length\n")
        await guest.stdout.readuntil(b"MiB")
        before = path.stat().st_ctime_ns
        async with flattening(node, threads) as made:
            assert await refused(merged(made, merge())) == "disk_in_use"
        assert path.stat().st_ctime_ns == before
        await guest.communicate(b"quit\n")
