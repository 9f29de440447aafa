"""Fills of volumes with a disk of a snapshot, whose VM may run meanwhile."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.imaged.tests.filling import Copies, ended, filling, names, work
from services.imaged.tests.records import ref, uid
from services.imaged.tests.site_under_test import MIB, NodeMaker
from services.imaged.tests.test_snapshots import NEW, OLD, refused, snapshot, snapshots, vm, write
from services.imaged.tests.test_snapshots import ended as taken
from services.imaged.tests.test_snapshots import work as snapshot_work

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.schemas.operation import ExportFormat
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
        self.below = len(source.below)
        end = os.fstat(source.disk).st_size
        self.found = os.pread(source.disk, len(OLD), end - len(OLD))
        await super().__call__(source, target, format_, limits, look, into)


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


async def test_a_snapshot_is_removed_after_the_copy_of_it(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    seen = Seen()
    seen.may.clear()
    async with make_node() as node, snapshots(node, threads) as made, asyncio.TaskGroup() as group:
        await node.disks.ensure(vm())
        write(node, OLD)
        await taken(made, snapshot_work(10))
        async with filling(node, threads, seen) as fills:
            while not seen.begun:
                await fills.do(of(10))
                await asyncio.sleep(0.01)
            removed = group.create_task(made.release(snapshot(10)))
            await asyncio.sleep(0.05)
            assert not removed.done()
            seen.may.set()
            assert (await ended(fills, of(10))).state == "done"
            assert await removed
            assert (await ended(fills, of(10))).state == "done", "the copy needs nothing else"


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
