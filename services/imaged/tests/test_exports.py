"""Exports: nothing partial is ever visible, and a repeated request completes or changes nothing."""

import asyncio
import contextlib
import gzip
import hashlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import empty, named, record, ref, uid, volume
from services.imaged.tests.site_under_test import FAST, MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.imaged.core.device_marks import END_BYTES
from virtbus.imaged.core.limits import SpaceLimits, TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, convert
from virtbus.imaged.edge.export_files import ExportFiles
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.exports import Converter, ExportParts, Exports
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import ExportWork, WorkState
from virtbus.schemas.operation import ExportFormat, ExportResult
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.wire import encode_json

ID, OTHER, VM = uid(90), uid(91), uid(1)
CONTENT = b"exported bytes"
REAL = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")


class Copies:
    """A converter that writes CONTENT once it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()
        self.begun = 0
        self.error: VirtbusError | None = None

    async def __call__(
        self,
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
        into: tuple[str, ...] = (),
    ) -> None:
        del source, format_, limits, into
        self.begun += 1
        os.write(target, CONTENT)
        await look()
        await self.may.wait()
        if self.error is not None:
            raise self.error


@contextlib.asynccontextmanager
async def exporting(
    node: Node,
    threads: DiskThreads,
    converter: Converter,
    space: SpaceLimits | None = None,
    pools: Pools | None = None,
) -> AsyncIterator[Exports]:
    root = node.files.root
    files = ExportFiles(root, DiskSpace(root, space or SpaceLimits(0, 0.0)))
    places = DiskPlaces(pools or Pools(node.files), node.store)
    parts = ExportParts(node.disks.locks, places, files, threads, FAST, node.disks.devices)
    async with asyncio.TaskGroup() as group:
        exports = Exports(DiskJobs(group), parts, converter)
        yield exports
        await exports.do(work("cancel"))


def work(do: str = "ensure", **more: object) -> ExportWork:
    return ExportWork.model_validate({"id": ID, "do": do, "uid": VM, "disk": "data"} | more)


async def ended(exports: Exports, want: ExportWork | None = None) -> WorkState:
    while (state := await exports.do(want or work())).state == "working":
        await asyncio.sleep(0.01)
    return state


def folder(node: Node) -> Path:
    return node.state / "disks" / "exports"


async def refused(asking: Awaitable[object]) -> str:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value.reason


async def test_a_disk_is_exported_once(make_node: NodeMaker, threads: DiskThreads) -> None:
    copies = Copies()
    async with make_node() as node, exporting(node, threads, copies) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        result = (await ended(exports)).result
        assert result is not None
        path = folder(node) / ID / "disk.qcow2"
        digest = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
        assert result == ExportResult(path=str(path), size_bytes=len(CONTENT), digest=digest)
        assert path.read_bytes() == CONTENT
        assert sorted(file.name for file in path.parent.iterdir()) == ["disk.qcow2", "note.json"]
        assert path.parent.stat().st_mode & 0o077 == 0
        assert (await ended(exports)).result == result
        assert copies.begun == 1
        assert await exports.do(work("cancel")) == WorkState(state="done", result=result)
        assert await exports.do(work("remove")) == WorkState(state="none")
        assert not folder(node).exists()


async def test_a_raw_disk_is_packed(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, exporting(node, threads, Copies()) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        result = (await ended(exports, work(format="raw.gz"))).result
        assert result is not None
        path = folder(node) / ID / "disk.raw.gz"
        assert gzip.decompress(path.read_bytes()) == CONTENT
        assert result.digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        assert sorted(file.name for file in path.parent.iterdir()) == ["disk.raw.gz", "note.json"]


async def test_a_cancel_before_the_end_leaves_nothing(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    copies = Copies()
    copies.may.clear()
    async with make_node() as node, exporting(node, threads, copies) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        while not copies.begun:
            assert (await exports.do(work())).state == "working"
            await asyncio.sleep(0.01)
        assert (await exports.do(work("cancel"))).state == "none"
        assert not folder(node).exists()
        copies.may.set()
        assert (await ended(exports)).state == "done"


@pytest.mark.parametrize(
    "left",
    [(), ("part",), ("part", "packed"), ("part", "note.json"), ("packed", "note.json")],
)
async def test_a_crash_before_the_final_step_is_repeated(
    make_node: NodeMaker, threads: DiskThreads, left: tuple[str, ...]
) -> None:
    copies = Copies()
    async with make_node() as node, exporting(node, threads, copies) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        there = folder(node) / ID
        there.mkdir(parents=True)
        note = ExportResult(
            path=str(there / "disk.qcow2"), size_bytes=3, digest=f"sha256:{'0' * 64}"
        )
        for name in left:
            (there / name).write_bytes(encode_json(note) if name == "note.json" else b"half")
        state = await ended(exports)
        assert state.result is not None
        assert (copies.begun, state.result.size_bytes) == (1, len(CONTENT))
        assert sorted(file.name for file in there.iterdir()) == ["disk.qcow2", "note.json"]


async def test_a_crash_after_the_final_step_has_exported(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    copies = Copies()
    async with make_node() as node:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        async with exporting(node, threads, copies) as exports:
            first = await ended(exports)
        async with exporting(node, threads, copies) as exports:
            assert await exports.do(work()) == first
    assert copies.begun == 1


@pytest.mark.parametrize("other", ["a start of the VM", "another VM", "a release"])
async def test_users_of_a_disk_wait_for_its_export(
    make_node: NodeMaker, threads: DiskThreads, other: str
) -> None:
    copies, of = Copies(), ref(8 * MIB)
    copies.may.clear()
    vm = record(named(), uid=VM, refs={"data": of})
    async with make_node() as node, exporting(node, threads, copies) as exports:
        await node.disks.ensure(vm)
        want = work(disk=None, ref=of)
        await exports.do(want)
        while not copies.begun:
            await asyncio.sleep(0.01)
        uses: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "a start of the VM": lambda: node.disks.ensure(vm),
            "another VM": lambda: node.disks.ensure(record(named(), uid=uid(2), refs={"data": of})),
            "a release": lambda: node.disks.release_volume(of),
        }
        async with asyncio.TaskGroup() as group:
            task = group.create_task(uses[other]())
            await asyncio.sleep(0.05)
            assert not task.done()
            copies.may.set()
        assert (await ended(exports, want)).state == "done"


async def test_failures_are_told_once_and_leave_nothing(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    copies = Copies()
    async with make_node() as node, exporting(node, threads, copies) as exports:
        assert await refused(ended(exports)) == "disk_missing"
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        assert (await ended(exports)).state == "done"
        await exports.do(work("remove"))
    full = SpaceLimits(min_free_bytes=2**62)
    async with make_node() as node, exporting(node, threads, copies, full) as exports:
        assert await refused(ended(exports)) == "disk_full"
        assert not folder(node).exists()


async def test_a_disk_whose_header_names_another_file_is_not_read(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path
) -> None:
    copies = Copies()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(MIB))
    async with make_node() as node, exporting(node, threads, copies) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        path = node.files.path(VM, "data")
        path.unlink()
        path.symlink_to(secret)
        assert await refused(ended(exports)) == "store_error"
    assert copies.begun == 0


async def test_an_export_outlives_its_disk(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, exporting(node, threads, Copies()) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        await ended(exports)
        await node.disks.release(VM, 1)
        assert not node.files.path(VM, "data").exists()
        assert (folder(node) / ID / "disk.qcow2").read_bytes() == CONTENT


async def test_old_exports_expire(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, exporting(node, threads, Copies()) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        await ended(exports)
        root = node.files.root
        files = ExportFiles(root, DiskSpace(root, SpaceLimits(0, 0.0)))
        assert files.expire(60.0, ()) == []
        os.utime(folder(node) / ID, (1, 1))
        assert files.expire(60.0, (ID,)) == []
        stuck = folder(node) / OTHER
        (stuck / "a folder").mkdir(parents=True)  # virtbus makes none, so it removes none
        os.utime(stuck, (1, 1))
        assert files.expire(60.0, ()) == [ID]
        assert list(folder(node).iterdir()) == [stuck]


@REAL
@pytest.mark.parametrize("format_", ["qcow2", "raw"])
async def test_the_file_is_the_disk_with_its_image(
    make_node: NodeMaker, threads: DiskThreads, server: Web, tmp_path: Path, format_: str
) -> None:
    server.files["a"] = qcow2_image()
    async with make_node() as node, exporting(node, threads, convert) as exports:
        await node.disks.ensure(record(volume(server.url("a")), uid=VM))
        disk = node.files.path(VM, "root")
        subprocess.run(["qemu-io", "-c", "write -P 7 1M 64k", str(disk)], check=True)
        state = await ended(exports, work(disk="root", format=format_))
        assert state.result is not None
        whole = tmp_path / "whole"
        subprocess.run(["qemu-img", "convert", "-O", format_, str(disk), str(whole)], check=True)
        compare = ["qemu-img", "compare", "-f", format_, "-F", format_]
        subprocess.run([*compare, state.result.path, str(whole)], check=True)
        data = Path(state.result.path).read_bytes()
        assert state.result.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert b"backing" not in subprocess.check_output(["qemu-img", "info", state.result.path])


@REAL
async def test_a_volume_on_a_device_is_exported_from_a_copy(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(8 * MIB + END_BYTES))
    of = ref(4 * MIB).model_copy(update={"pool": "raw", "kind": PoolKind.BLOCK, "copied": True})
    opened = lambda _pool, _volume: os.open(device, os.O_RDWR)  # noqa: E731
    async with make_node(open_device=opened) as node, exporting(node, threads, convert) as exports:
        want = work(uid=of.uid, disk=None, ref=of)
        assert await refused(ended(exports, want)) == "volume_empty"
        await node.disks.devices.fill(of, 4 * MIB, None, FAST, Job())
        with device.open("r+b") as file:
            file.seek(MIB)
            file.write(b"written by a guest")
        state = await ended(exports, want)
        assert state.result is not None
        run = ["qemu-img", "convert", "-O", "raw", state.result.path, str(tmp_path / "raw")]
        subprocess.run(run, check=True)
        assert (tmp_path / "raw").read_bytes() == device.read_bytes()[: 4 * MIB]


@REAL
async def test_a_header_that_the_guest_changed_does_not_choose_the_image(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path
) -> None:
    """QEMU writes the header of a running guest's disk, so it is not trusted."""
    secret = tmp_path / "secret.raw"
    secret.write_bytes(b"canary" * 100_000)
    async with make_node() as node, exporting(node, threads, convert) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        disk = node.files.path(VM, "data")
        rebase = ["qemu-img", "rebase", "-u", "-F", "raw", "-b", str(secret), str(disk)]
        subprocess.run(rebase, check=True)
        assert await refused(ended(exports)) in {"disk_mismatch", "disk_damaged"}


@REAL
async def test_a_disk_that_a_program_writes_is_refused(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, exporting(node, threads, convert) as exports:
        await node.disks.ensure(record(empty(8 * MIB), uid=VM))
        disk = str(node.files.path(VM, "data"))
        with subprocess.Popen(["qemu-io", disk], stdin=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            writer.stdin.write(b"write 0 64k\n")
            writer.stdin.flush()
            await asyncio.sleep(1.0)
            assert await refused(ended(exports)) == "disk_in_use"
            writer.stdin.close()
