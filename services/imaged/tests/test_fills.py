"""Fills of volumes: nobody sees a partial disk, and each request may be repeated."""

import asyncio
import contextlib
import gzip
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.filling import (
    AT,
    CONTENT,
    Copies,
    Filled,
    ended,
    filling,
    folder,
    names,
    work,
)
from services.imaged.tests.records import named, record, ref, uid, volume
from services.imaged.tests.site_under_test import (
    MIB,
    NodeMaker,
    Web,
    qcow2_image,
    qcow2_with_backing,
    raw_server,
)

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.fill_waits import FillWaits
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.volume_ref import VolumeRef

VM = uid(1)
REAL = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")


def copied(size_bytes: int = 0, name: str = "data-1") -> VolumeRef:
    number = 77 if name == "data-1" else 78
    return ref(size_bytes, name=name).model_copy(update={"copied": True, "uid": uid(number)})


def user(of: VolumeRef, number: int = 1) -> Any:
    return record(named(), uid=uid(number), refs={"data": of})


async def refused(asking: Awaitable[object]) -> str:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value.reason


async def test_a_vm_does_not_wait_for_a_volume_that_it_detaches(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    leaving = record(uid=uid(1), refs={"data": copied()})  # the spec has no such volume any more
    assert set(leaving.detaching) == {"data"}
    async with make_node() as node, asyncio.timeout(5):
        await FillWaits(Pools(node.files), threads).wait(leaving)


async def test_a_volume_is_filled_once_and_a_vm_waits_for_it(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of, copies, filled = copied(32 * MIB), Copies(), Filled()
    copies.may.clear()
    async with make_node() as node, filling(node, threads, copies, filled=filled) as fills:
        assert await refused(node.disks.ensure(user(of))) == "volume_not_filled"
        want = work(of, image=server.url("a"))
        while not copies.begun:
            assert (await fills.do(want)).state == "working"
            await asyncio.sleep(0.01)
        assert names(node, of) == ["part", "record.json"]
        copies.may.set()
        state = await ended(fills, want)
        assert (state.virtual_size_bytes, filled.times) == (32 * MIB, 1)
        assert names(node, of) == ["disk.qcow2", "record.json"]
        disk = folder(node, of) / "disk.qcow2"
        assert disk.read_bytes()[AT : AT + len(CONTENT)] == CONTENT
        assert disk.stat().st_mode & 0o077 == 0
        ready = (await node.disks.ensure(user(of))).ready
        assert ready.disks["data"].virtual_size_bytes == 32 * MIB
        assert (await ended(fills, want), copies.begun) == (state, 1)
        assert (await fills.do(work(of, "cancel"))).state == "done"
        assert names(node, of) == ["disk.qcow2", "record.json"]


async def test_a_vm_continues_when_its_volumes_are_filled(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of, copies = copied(), Copies()
    copies.may.clear()
    async with make_node() as node:
        waits = FillWaits(Pools(node.files), threads)
        filled = waits.tell
        async with filling(node, threads, copies, filled=filled) as fills, asyncio.TaskGroup() as g:
            await fills.do(work(of, image=server.url("a")))
            waiting = g.create_task(waits.wait(user(of)))
            while not copies.begun:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            with pytest.raises(VirtbusError, match="no content yet"):
                waits.refuse_waiting(VM)
            copies.may.set()
            await waiting
            waits.refuse_waiting(VM)
            await waits.wait(user(of))


async def test_a_cancel_before_the_end_leaves_nothing(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of, copies = copied(), Copies()
    copies.may.clear()
    async with make_node() as node, filling(node, threads, copies) as fills:
        want = work(of, image=server.url("a"))
        while not copies.begun:
            await fills.do(want)
            await asyncio.sleep(0.01)
        assert (await fills.do(work(of, "cancel"))).state == "none"
        assert not folder(node, of).parent.exists()
        copies.may.set()
        state = await ended(fills, want)
        assert (state.state, state.virtual_size_bytes) == ("done", 16 * MIB)


async def test_a_cancel_during_the_fetch_ends_the_transfer(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    of = copied()
    async with (
        raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\nx", hang=True) as url,
        make_node() as node,
        filling(node, threads, Copies()) as fills,
    ):
        want = work(of, image=f"{url}/a")
        while (await fills.do(want)).step != "fetch" or not node.parts():
            await asyncio.sleep(0.01)
        assert (await fills.do(work(of, "cancel"))).state == "none"
        while node.parts():  # the transfer ends after its last request
            await asyncio.sleep(0.01)
        assert not folder(node, of).parent.exists()


@pytest.mark.parametrize("left", [("part",), ("part", "record.json"), ("record.json",)])
async def test_what_a_crash_left_is_replaced_or_removed(
    make_node: NodeMaker, threads: DiskThreads, server: Web, left: tuple[str, ...]
) -> None:
    server.files["a"] = qcow2_image()
    of, copies = copied(), Copies()
    async with make_node() as node, filling(node, threads, copies) as fills:
        for do in ("cancel", "ensure"):
            folder(node, of).mkdir(parents=True)
            for name in left:
                (folder(node, of) / name).write_bytes(b"half")
            state = await ended(fills, work(of, do, image=server.url("a")))
            wanted = [] if do == "cancel" else ["disk.qcow2", "record.json"]
            assert (state.state, names(node, of)) == ("none" if not wanted else "done", wanted)


async def test_a_restarted_imaged_finds_the_disk(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of, copies = copied(), Copies()
    want = work(of, image=server.url("a"))
    async with make_node() as node:
        async with filling(node, threads, copies) as fills:
            first = await ended(fills, want)
        async with filling(node, threads, copies) as fills:
            assert await fills.do(want) == first
    assert copies.begun == 1


async def test_failures_are_told_once_and_leave_nothing(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    server.files["hostile"] = qcow2_with_backing()
    image = server.url("a")
    async with make_node() as node, filling(node, threads, Copies()) as fills:
        cases: list[tuple[VolumeRef, dict[str, Any], str]] = [
            (copied(8 * MIB), {"image": image}, "disk_too_small"),
            (copied(4 * 1024**4), {"image": image}, "disk_too_large"),
            (copied(), {"volume": copied(name="other")}, "disk_missing"),
            (copied(), {"image": server.url("hostile")}, "backing_file"),
            (copied(), {"image": "nowhere"}, "image_unknown"),
        ]
        for of, source, reason in cases:
            assert await refused(ended(fills, work(of, **source))) == reason
            assert names(node, of) == []
        assert (await ended(fills, work(copied(), image=image))).state == "done"
    full = SpaceLimits(min_free_bytes=2**62)
    of = copied(name="full")
    async with make_node() as node, filling(node, threads, Copies(), full) as fills:
        assert await refused(ended(fills, work(of, image=image))) == "disk_full"
        assert names(node, of) == []


async def test_a_deleted_volume_is_not_filled(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of, copies = copied(), Copies()
    async with make_node() as node, filling(node, threads, copies) as fills:
        await node.disks.release_volume(of)
        assert await refused(ended(fills, work(of, image=server.url("a")))) == "released"
        assert (names(node, of), copies.begun) == ([], 0)


@pytest.mark.parametrize("other", ["a start of its VM", "a release"])
async def test_users_of_the_copied_volume_wait(
    make_node: NodeMaker, threads: DiskThreads, other: str
) -> None:
    source, of, copies = ref(8 * MIB), copied(name="data-2"), Copies()
    copies.may.clear()
    vm = record(named(), uid=VM, refs={"data": source})
    async with make_node() as node, filling(node, threads, copies) as fills:
        await node.disks.ensure(vm)
        while not copies.begun:
            await fills.do(work(of, volume=source))
            await asyncio.sleep(0.01)
        uses: dict[str, Callable[[], Any]] = {
            "a start of its VM": lambda: node.disks.ensure(vm),
            "a release": lambda: node.disks.release_volume(source),
        }
        async with asyncio.TaskGroup() as group:
            task = group.create_task(uses[other]())
            await asyncio.sleep(0.05)
            assert not task.done()
            copies.may.set()
        assert (await ended(fills, work(of, volume=source))).state == "done"


async def test_only_a_release_removes_a_filled_volume(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of = copied()
    async with make_node() as node, filling(node, threads, Copies()) as fills:
        await ended(fills, work(of, image=server.url("a")))
        await node.disks.ensure(user(of))
        await node.disks.release(VM, 1)
        assert names(node, of) == ["disk.qcow2", "record.json"]
        (held,) = (await node.disks.held_volumes("")).volumes
        assert (held.ref, held.holder) == (of, VM)
        assert await node.disks.release_volume(of)
        assert not folder(node, of).parent.exists()


# --- with qemu-img ------------------------------------------------------------------------------
def image_file(path: Path, format_: str, size: str = "16M") -> bytes:
    """Return a disk with a pattern at 1 MiB."""
    subprocess.run(["qemu-img", "create", "-q", "-f", format_, str(path), size], check=True)
    write = ["qemu-io", "-f", format_, "-c", "write -q -P 7 1M 64k", str(path)]
    subprocess.run(write, check=True)
    return path.read_bytes()


def check(disk: Path, pattern_at: str = "1M") -> None:
    """Raise if a disk is damaged, rests on another file, or lacks the pattern."""
    subprocess.run(["qemu-img", "check", "-q", str(disk)], check=True)
    assert b"backing" not in subprocess.check_output(["qemu-img", "info", str(disk)])
    read = ["qemu-io", "-r", "-c", f"read -q -P 7 {pattern_at} 64k", str(disk)]
    assert b"failed" not in subprocess.check_output(read, stderr=subprocess.STDOUT)


@REAL
@pytest.mark.parametrize("kind", ["qcow2", "raw", "raw.gz", "vmdk"])
async def test_an_image_of_each_format_becomes_an_own_disk(
    make_node: NodeMaker, threads: DiskThreads, server: Web, tmp_path: Path, kind: str
) -> None:
    data = image_file(tmp_path / "image", kind.partition(".")[0])
    server.files["a"] = gzip.compress(data) if kind == "raw.gz" else data
    of = copied(24 * MIB)
    async with make_node() as node, filling(node, threads) as fills:
        state = await ended(fills, work(of, image=server.url("a")))
        assert state.virtual_size_bytes == 24 * MIB
        disk = folder(node, of) / "disk.qcow2"
        check(disk)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        await node.disks.collect_garbage(0.0)
        assert node.data() == []  # the copy does not need the image
        grown = of.model_copy(update={"size_bytes": 48 * MIB})
        await node.disks.ensure(user(grown))
        check(disk)
        assert b"48 MiB" in subprocess.check_output(["qemu-img", "info", str(disk)])


@REAL
async def test_a_clone_of_a_clone_outlives_both(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    first = ref(16 * MIB, image=server.url("a"))
    second, third = copied(name="data-2"), copied(name="data-3")
    third = third.model_copy(update={"uid": uid(79)})
    async with make_node() as node, filling(node, threads) as fills:
        await node.disks.ensure(record(named(), uid=VM, refs={"data": first}))
        disk = folder(node, first) / "disk.qcow2"
        write = ["qemu-io", "-c", "write -q -P 7 1M 64k", str(disk)]
        subprocess.run(write, check=True)
        await ended(fills, work(second, volume=first))
        await node.disks.release(VM, 1)
        await node.disks.release_volume(first)
        want = work(third, volume=second).model_copy(update={"id": uid(91)})
        await ended(fills, want)
        await node.disks.release_volume(second)
        check(folder(node, third) / "disk.qcow2")


@REAL
async def test_a_disk_of_a_vm_outlives_it_with_its_image(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    of = copied()
    async with make_node() as node, filling(node, threads) as fills:
        await node.disks.ensure(record(volume(server.url("a")), uid=VM))
        disk = node.files.path(VM, "root")
        subprocess.run(["qemu-io", "-c", "write -q -P 7 1M 64k", str(disk)], check=True)
        await ended(fills, work(of, vm=VM, epoch=1, disk="root"))
        await node.disks.release(VM, 1)
        check(folder(node, of) / "disk.qcow2")


@REAL
async def test_a_volume_that_a_program_writes_is_not_copied(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    source, of = ref(8 * MIB), copied(name="data-2")
    async with make_node() as node, filling(node, threads) as fills:
        await node.disks.ensure(record(named(), uid=VM, refs={"data": source}))
        disk = str(folder(node, source) / "disk.qcow2")
        with subprocess.Popen(["qemu-io", disk], stdin=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            with contextlib.closing(writer.stdin):
                writer.stdin.write(b"write 0 64k\n")
                writer.stdin.flush()
                await asyncio.sleep(1.0)
                assert await refused(ended(fills, work(of, volume=source))) == "disk_in_use"
        assert names(node, of) == []


@REAL
async def test_the_header_of_a_copied_volume_does_not_choose_a_file(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.raw"
    secret.write_bytes(b"canary" * 100_000)
    source, of = ref(8 * MIB), copied(name="data-2")
    async with make_node() as node, filling(node, threads) as fills:
        await node.disks.ensure(record(named(), uid=VM, refs={"data": source}))
        disk = str(folder(node, source) / "disk.qcow2")
        rebase = ["qemu-img", "rebase", "-u", "-F", "raw", "-b", str(secret), disk]
        subprocess.run(rebase, check=True)
        reason = await refused(ended(fills, work(of, volume=source)))
        assert reason in {"disk_mismatch", "disk_damaged"}
        assert names(node, of) == []


async def test_a_volume_comes_back_to_a_node_that_it_has_left_and_meets_no_old_data(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    of = copied(8 * MIB)
    async with make_node() as node, filling(node, threads, Copies()) as fills:
        server.files["a"] = qcow2_image()
        here = work(of, image=server.url("a"), moved=True)
        assert (await ended(fills, here)).state == "done"
        assert (await ended(fills, here)).state == "done", "a repeat finds its own work"
        later = here.model_copy(update={"id": uid(91)})
        assert await refused(ended(fills, later)) == "volume_exists"
        assert (await fills.do(later.model_copy(update={"do": "cancel"}))).state == "none"
        assert not await node.disks.release_volume(of, made_by=later.id), "it is not its own"
        assert names(node, of) == ["disk.qcow2", "record.json"]
        await node.disks.ensure(user(of))
        assert await refused(ended(fills, here)) == "volume_exists", "a VM has used it since"
        assert await node.disks.release_volume(of)
        assert (await ended(fills, later)).state == "done"
        assert await node.disks.release_volume(of, made_by=later.id)
        assert (await ended(fills, later)).state == "done"
        stale = ref(8 * MIB)
        await node.disks.release_volume(of)
        assert await refused(node.disks.ensure(user(stale))) == "released"
