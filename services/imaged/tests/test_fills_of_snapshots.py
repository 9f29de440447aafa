"""Fills of volumes with a disk of a snapshot, whose VM may run meanwhile."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.imaged.tests.filling import Copies, ended, filling, names, work
from services.imaged.tests.records import empty, record, ref, uid
from services.imaged.tests.site_under_test import MIB, NodeMaker
from services.imaged.tests.test_snapshots import NEW, OLD, refused, snapshot, snapshots, vm, write
from services.imaged.tests.test_snapshots import ended as taken
from services.imaged.tests.test_snapshots import work as snapshot_work

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.schemas.operation import ExportFormat
from virtbus.schemas.snapshot import Origin
from virtbus.schemas.volume_ref import VolumeRef


class Seen(Copies):
    """A converter that keeps the end of what it copies, and the number of files below."""

    found: bytes = b""
    below: int = 0

    async def __call__(
        self,
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
        into: tuple[str, ...] = (),
    ) -> None:
        await super().__call__(source, target, format_, limits, look, into)
        self.below = len(source.below)
        end = os.fstat(source.disk).st_size
        self.found = os.pread(source.disk, len(OLD), end - len(OLD))


def copied(number: int = 77) -> VolumeRef:
    name = f"copy-{number}"
    return ref(0, name=name).model_copy(update={"copied": True, "uid": uid(number)})


def of(number: int, disk: str = "", **more: Any) -> Any:
    return work(copied(), snapshot=snapshot(number), disk=disk, **more)


@pytest.mark.parametrize("layered", [False, True])
async def test_a_volume_gets_the_content_of_the_snapshots_instant(
    make_node: NodeMaker, threads: DiskThreads, layered: bool
) -> None:
    seen = Seen()
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await taken(made, snapshot_work(10, layered=layered))
        write(node, NEW)
        async with filling(node, threads, seen) as fills:
            state = await ended(fills, of(10, "data"))
        assert (state.state, state.virtual_size_bytes) == ("done", 8 * MIB)
        assert (seen.found, seen.below) == (OLD, 0)
        assert names(node, copied()) == ["disk.qcow2", "record.json"]


async def test_a_layer_is_copied_with_what_it_rests_on(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    seen = Seen()
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await taken(made, snapshot_work(10, layered=True))
        write(node, NEW)
        await taken(made, snapshot_work(11, layered=True))
        async with filling(node, threads, seen) as fills:
            await ended(fills, of(11))
        assert (seen.found, seen.below) == (NEW, 1)


async def test_a_snapshot_is_cloned_and_removed_during_the_copy_of_it(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    seen = Seen()
    seen.may.clear()
    clone = record(empty(8 * MIB, "own"), uid=uid(2)).model_copy(
        update={"origin": Origin(snapshot=snapshot(10), node="n1")}
    )
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await taken(made, snapshot_work(10))
        async with filling(node, threads, seen) as fills, asyncio.timeout(5):
            while not seen.begun:
                await fills.do(of(10))
                await asyncio.sleep(0.01)
            assert (await node.disks.ensure(clone)).ready.disks["own"].layers
            assert await made.release(snapshot(10))
            seen.may.set()
            assert (await ended(fills, of(10))).state == "done"
            assert seen.found == OLD
            assert (await ended(fills, of(10))).state == "done", "the copy needs nothing else"


async def test_copies_of_one_snapshot_follow_each_other(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    seen = Seen()
    seen.may.clear()
    second = of(10).model_copy(update={"id": uid(91), "ref": copied(78)})
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        await taken(made, snapshot_work(10))
        async with filling(node, threads, seen) as fills, asyncio.timeout(5):
            for _ in range(10):
                for want in (of(10), second):
                    assert (await fills.do(want)).state == "working"
                await asyncio.sleep(0.01)
            assert seen.begun == 1
            seen.may.set()
            for want in (of(10), second):
                assert (await ended(fills, want)).state == "done"


async def test_a_missing_snapshot_or_disk_is_a_failure_that_names_it(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await taken(made, snapshot_work(10))
        async with filling(node, threads, Seen()) as fills:
            assert await refused(ended(fills, of(9))) == "snapshot_missing"
            assert await refused(ended(fills, of(10, "other"))) == "disk_missing"
            assert names(node, copied()) == []
