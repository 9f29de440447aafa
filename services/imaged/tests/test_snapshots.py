"""Snapshots: complete or absent after any crash, and a restore replaces all disks or none."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import empty, named, record, ref, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.snapshot_parts import SnapshotParts
from virtbus.imaged.snapshots import Snapshots
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import HeldSnapshot, WorkState
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.vm import VmRecord

VM, OF = uid(1), ref(8 * MIB)
OLD, NEW = b"old " * 5000, b"new " * 5000
DISKS = (SnapshotDisk(name="own"), SnapshotDisk(name="data", ref=OF))
REAL = pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io")


def vm() -> VmRecord:
    return record(empty(8 * MIB, "own"), named(), uid=VM, refs={"data": OF})


def snapshot(number: int) -> SnapshotRef:
    return SnapshotRef(uid=uid(number), namespace="default", name=f"s-{number}")


def work(number: int, restored: int | None = None, **more: Any) -> SnapshotWork:
    fields: dict[str, Any] = {
        "id": uid(number),
        "uid": VM,
        "name": "web",
        "disks": DISKS,
        "snapshot": snapshot(number),
        "restored": None if restored is None else snapshot(restored),
    }
    return SnapshotWork.model_validate(fields | more)


@contextlib.asynccontextmanager
async def snapshots(
    node: Node, threads: DiskThreads, space: SpaceLimits | None = None
) -> AsyncIterator[Snapshots]:
    """Start the snapshots of a node, as a new imaged does."""
    parts = SnapshotParts(
        node.disks.locks,
        DiskPlaces(Pools(node.files), node.store),
        SnapshotFolders(node.files.root),
        DiskSpace(node.files.root, space or SpaceLimits(0, 0.0)),
        threads,
    )
    async with asyncio.TaskGroup() as group:
        made = Snapshots(DiskJobs(group), parts)
        await made.recover()
        yield made


async def ended(made: Snapshots, want: SnapshotWork) -> WorkState:
    while (state := await made.do(want)).state == "working":
        await asyncio.sleep(0.001)
    return state


async def refused(asking: Awaitable[object]) -> str:
    with pytest.raises(VirtbusError) as error:
        await asking
    return error.value.reason


def files(node: Node) -> tuple[Path, Path]:
    disks = node.state / "disks"
    return disks / VM / "own.qcow2", disks / "volumes" / OF.folder / "disk.qcow2"


def folder(node: Node, number: int) -> Path:
    return node.state / "disks" / "snapshots" / snapshot(number).folder


def kept(node: Node, number: int) -> tuple[bytes, ...]:
    """The ends of the disks of a snapshot."""
    there = folder(node, number)
    return tuple((there / f"{disk.name}.qcow2").read_bytes()[-len(OLD) :] for disk in DISKS)


def write(node: Node, content: bytes) -> None:
    """Write to both disks, as a guest does."""
    for path in files(node):
        data = path.read_bytes().removesuffix(OLD).removesuffix(NEW)
        path.write_bytes(data + content)


def has(node: Node) -> set[bytes]:
    return {path.read_bytes()[-len(OLD) :] for path in files(node)}


async def test_a_snapshot_is_restored_and_what_it_replaced_is_kept(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        state = await ended(made, work(10))
        assert (state.state, state.done_bytes) == ("done", state.total_bytes)
        assert sorted(path.name for path in folder(node, 10).iterdir()) == [
            *("data.qcow2", "own.qcow2", "record.json")
        ]
        assert {path.stat().st_mode & 0o777 for path in folder(node, 10).glob("*.qcow2")} == {0o400}
        write(node, NEW)
        replaced = [path.stat().st_ino for path in files(node)]
        assert (await ended(made, work(11, restored=10))).state == "done"
        assert has(node) == {OLD}
        assert kept(node, 11) == (NEW, NEW)
        inodes = {path.stat().st_ino for path in folder(node, 11).glob("*.qcow2")}
        assert inodes == set(replaced)  # no data was copied for it
        assert {path.stat().st_nlink for path in files(node)} == {1}
        assert not (await node.disks.ensure(vm())).made
        await ended(made, work(12, restored=11))
        assert has(node) == {NEW}
        assert kept(node, 10) == (OLD, OLD)


async def test_a_snapshot_outlives_its_vm_and_keeps_its_image(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    disks = [SnapshotDisk(name="root")]
    async with make_node() as node, snapshots(node, threads) as made:
        ready = (await node.disks.ensure(record(volume(server.url("a")), uid=VM))).ready
        await ended(made, work(10, disks=disks))
        await node.disks.release(VM, 1)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        assert await node.disks.collect_garbage(0.0) == ()
        assert await made.release(snapshot(10))
        assert not folder(node, 10).exists()
        assert not await made.release(snapshot(10))
        assert await node.disks.collect_garbage(0.0) == (ready.digest,)


async def test_another_vm_gets_the_disks_and_keeps_its_own_volume(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    other, of = uid(2), ref(16 * MIB, name="data-2")
    disks = (SnapshotDisk(name="own"), SnapshotDisk(name="data", ref=of))
    vm2 = record(empty(8 * MIB, "own"), named(of="data-2"), uid=other, refs={"data": of})
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await ended(made, work(10))
        await node.disks.ensure(vm2)
        await ended(made, work(11, 10, uid=other, disks=disks))
        there = node.state / "disks"
        for path in (there / other / "own.qcow2", there / "volumes" / of.folder / "disk.qcow2"):
            assert path.read_bytes().endswith(OLD)
        grown = (await node.disks.ensure(vm2)).ready.disks["data"]
        assert grown.virtual_size_bytes == 16 * MIB
        tiny = ref(4 * MIB, name="data-3")
        small = (DISKS[0], SnapshotDisk(name="data", ref=tiny))
        vm3 = record(empty(MIB, "own"), named(), uid=uid(3), refs={"data": tiny})
        await node.disks.ensure(vm3)
        assert await refused(ended(made, work(12, 10, uid=uid(3), disks=small))) == "disks_differ"
        own = (SnapshotDisk(name="own"), SnapshotDisk(name="data"))
        assert await refused(ended(made, work(12, 10, uid=other, disks=own))) == "disks_differ"


class CrashError(Exception):
    """The process ends here."""


class Crashes:
    """Refuses each change of the file system from the `left`-th on, as a killed process does."""

    CHANGES = frozenset(
        {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
    )

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if self.left is None:
            return
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not writes and event not in self.CHANGES:
            return
        self.left -= 1
        if self.left < 0:
            raise CrashError


@pytest.fixture(scope="module")
def crashes() -> Crashes:
    return Crashes()


async def crashed(made: Snapshots, want: SnapshotWork, crashes: Crashes, point: int) -> bool:
    """Return False if the work needs fewer than `point` changes."""
    crashes.left = point
    try:
        await ended(made, want)
    except VirtbusError as error:
        if error.reason != "internal":
            raise
        return True
    finally:
        crashes.left = None
    return False


async def test_a_crash_at_any_write_of_a_snapshot_leaves_none_or_all_of_it(
    make_node: NodeMaker, threads: DiskThreads, crashes: Crashes
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        write(node, OLD)
        point, more = 0, True
        while more:
            async with snapshots(node, threads) as made:
                more = await crashed(made, work(10), crashes, point)
            async with snapshots(node, threads) as made:
                assert has(node) == {OLD}
                assert folder(node, 10).exists() == (folder(node, 10) / "record.json").exists()
                assert {path.stat().st_nlink for path in files(node)} == {1}
                assert (await ended(made, work(10))).state == "done"
                assert kept(node, 10) == (OLD, OLD)
                await made.release(snapshot(10))
            point += 1
        assert point > 10


async def test_a_crash_at_any_write_of_a_restore_replaces_all_disks_or_none(
    make_node: NodeMaker, threads: DiskThreads, crashes: Crashes
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        write(node, OLD)
        async with snapshots(node, threads) as made:
            await ended(made, work(10))
        seen, point, more = set(), 0, True
        while more:
            write(node, NEW)
            async with snapshots(node, threads) as made:
                more = await crashed(made, work(11, 10), crashes, point)
            async with snapshots(node, threads) as made:
                await node.disks.ensure(vm())  # waits for a restore that continues
                (content,) = has(node)
                seen.add(content)
                whole = (folder(node, 11) / "record.json").exists()
                assert whole == folder(node, 11).exists() == (content == OLD)
                assert not list((node.state / "disks").glob("**/.new-*"))
                assert {path.stat().st_nlink for path in files(node)} == {1}
                assert (await ended(made, work(11, 10))).state == "done"
                assert (has(node), kept(node, 11)) == ({OLD}, (NEW, NEW))
                await made.release(snapshot(11))
            point += 1
        assert seen == {OLD, NEW}
        assert kept(node, 10) == (OLD, OLD)


async def test_a_cancel_before_the_end_leaves_nothing_and_after_it_is_too_late(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        async with node.disks.locks.of(VM):
            assert (await made.do(work(10))).state == "working"
            await asyncio.sleep(0.01)
            assert (await made.do(work(10, do="cancel"))).state == "none"
        assert not folder(node, 10).exists()
        await ended(made, work(10))
        assert (await made.do(work(10, do="cancel"))).state == "done"
        assert folder(node, 10).exists()


async def test_a_start_of_the_vm_waits_for_the_copy(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        lock = node.disks.locks.of(f"snapshot {snapshot(10).folder}")
        async with asyncio.TaskGroup() as group, lock:
            await made.do(work(10))
            await asyncio.sleep(0.01)
            start = group.create_task(node.disks.ensure(vm()))
            await asyncio.sleep(0.05)
            assert not start.done()
        assert (await ended(made, work(10))).state == "done"


async def test_failures_are_told_and_leave_nothing(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        async with snapshots(node, threads) as made:
            assert await refused(ended(made, work(10))) == "disk_missing"
            await node.disks.ensure(vm())
            assert await refused(ended(made, work(10, may_begin=False))) == "disk_in_use"
            assert await refused(ended(made, work(11, 10))) == "snapshot_missing"
            await ended(made, work(10))
            fewer = work(11, 10, disks=DISKS[:1])
            assert await refused(ended(made, fewer)) == "disks_differ"
            await made.release(snapshot(10))
        assert [path.name for path in (node.state / "disks").glob("snapshots/*")] == []


async def test_a_copy_needs_free_space_and_a_shared_disk_or_a_delete_does_not(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        async with snapshots(node, threads) as made:
            shared = (await ended(made, work(10))).done_bytes == 0
        async with snapshots(node, threads, SpaceLimits(min_free_bytes=2**62)) as made:
            for want in (work(11), work(12, 10)):
                if shared:
                    assert (await ended(made, want)).state == "done"
                else:
                    assert await refused(ended(made, want)) == "disk_full"
                await made.release(want.snapshot)
            assert await made.release(snapshot(10))
        assert [path.name for path in (node.state / "disks").glob("snapshots/*")] == []


async def test_the_snapshots_of_a_host_say_what_they_are(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        await ended(made, work(10))
        folder(node, 11).mkdir()
        page = await made.held("")
        whole = HeldSnapshot(folder=snapshot(10).folder, ref=snapshot(10), uid=VM, name="web")
        size = page.snapshots[0].size_bytes
        torn = HeldSnapshot(folder=snapshot(11).folder)
        assert page.snapshots == (whole.model_copy(update={"size_bytes": size}), torn)
        assert (await made.held(snapshot(11).folder)).snapshots == ()


@REAL
async def test_a_disk_that_a_program_uses_is_refused_and_kept_from_starting(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        with subprocess.Popen(["qemu-io", str(files(node)[0])], stdin=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            writer.stdin.write(b"write 0 64k\n")
            writer.stdin.flush()
            await asyncio.sleep(1.0)
            assert await refused(ended(made, work(10))) == "disk_in_use"
            writer.stdin.close()
        assert (await ended(made, work(10))).state == "done"
        subprocess.run(["qemu-img", "check", "-q", str(folder(node, 10) / "own.qcow2")], check=True)
