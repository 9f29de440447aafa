"""Snapshots by layers: a disk has all its content at each instant, and a layer never changes."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import record, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_snapshots import (
    DISKS,
    NEW,
    OF,
    OLD,
    VM,
    Crashes,
    crashed,
    crashes,
    ended,
    files,
    folder,
    has,
    refused,
    snapshot,
    snapshots,
    vm,
    work,
    write,
)

from virtbus.imaged import layering
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.layer_files import LayerFolder
from virtbus.imaged.snapshots import Snapshots
from virtbus.schemas.layer import MAX_LAYERS
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.snapshot_rpc import SnapshotWork

__all__ = ["crashes"]  # a fixture

REAL = pytest.mark.integration  # it needs qemu-io


def layered(number: int, **more: Any) -> SnapshotWork:
    return work(number, layered=True, **more)


def live(number: int, **more: Any) -> SnapshotWork:
    sized = [disk.model_copy(update={"size_bytes": 8 * MIB}) for disk in DISKS]
    return layered(number, live=True, disks=sized, **more)


def layers(node: Node, number: int) -> tuple[Path, ...]:
    there = node.state / "disks" / "layers"
    return tuple(there / f"{uid(number)}.{disk.name}.qcow2" for disk in DISKS)


def frozen(node: Node, number: int) -> set[bytes]:
    return {path.read_bytes()[-len(OLD) :] for path in layers(node, number)}


def staged(node: Node) -> list[Path]:
    return [path.with_name(f".new-{path.name}") for path in files(node)]


def guest_writes(node: Node) -> None:
    """QEMU, which uses the new files, writes to them."""
    for path in staged(node):
        path.write_bytes(path.read_bytes() + NEW)


async def begun(made: Snapshots, want: SnapshotWork) -> WorkState:
    state = await made.do(want)
    assert (state.state, state.step) == ("working", "layer")
    return state


def nothing_is_left(node: Node, number: int) -> bool:
    left = (folder(node, number), *staged(node), *layers(node, number))
    return not any(one.exists() for one in left)


async def test_the_disks_of_a_guest_go_on_in_new_files_once_qemu_uses_them(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        inodes = [path.stat().st_ino for path in files(node)]
        await begun(made, live(10))
        assert [path.stat().st_ino for path in files(node)] == inodes
        guest_writes(node)
        state = await made.do(live(10, switched=True))
        assert state.state == "done"
        assert [path.stat().st_ino for path in layers(node, 10)] == inodes
        assert {path.stat().st_mode & 0o777 for path in layers(node, 10)} == {0o444}
        assert (frozen(node, 10), has(node)) == ({OLD}, {NEW})
        assert {path.stat().st_nlink for path in files(node)} == {1}
        disks = (await node.disks.ensure(vm())).ready.disks
        assert disks["own"].layers == (layers(node, 10)[0].name,)
        assert disks["own"].virtual_size_bytes == 8 * MIB
        assert (await made.do(live(10))).state == "done"


async def test_disks_without_a_guest_are_layers_with_the_first_answer(
    make_node: NodeMaker, threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layering, "SOON_S", 60.0)
    monkeypatch.setattr("virtbus.imaged.snapshots.SOON_S", 60.0)
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        assert (await made.do(layered(10))).state == "done"
        assert frozen(node, 10) == {OLD}
        write(node, NEW)
        assert (await made.do(work(11, 10))).state == "done", "so is a restore"


async def test_without_a_switch_nothing_has_changed(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        await begun(made, live(10))
        assert (await made.do(live(10, do="cancel", switched=False))).state == "none"
        assert has(node) == {OLD}
        assert nothing_is_left(node, 10)
        await begun(made, live(10))
        late = await made.do(live(10, do="cancel", switched=True))
        assert late.state == "done"


async def test_a_snapshot_of_a_guest_that_has_just_ended_fails_as_guest_ended(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        write(node, OLD)
        without_sizes = layered(10, live=True)
        assert await refused(ended(made, without_sizes)) == "guest_ended"
        assert has(node) == {OLD}
        assert nothing_is_left(node, 10)


async def test_a_start_waits_until_it_is_known_which_files_have_the_content(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        write(node, OLD)
        async with snapshots(node, threads) as made:
            await begun(made, live(10))
            guest_writes(node)
            # no QEMU has the disks any more, and nobody says anything: the files decide
            await node.disks.ensure(vm())
            assert (has(node), frozen(node, 10)) == ({NEW}, {OLD})
            assert (await made.do(live(10))).state == "done"
            await begun(made, live(11))
            await node.disks.ensure(vm())
            assert has(node) == {NEW}
            assert nothing_is_left(node, 11)
            assert await refused(made.do(live(11))) == "guest_ended"


async def killed(node: Node, threads: DiskThreads) -> None:
    """Begin a snapshot in a process that ends."""
    async with asyncio.timeout(0.5), snapshots(node, threads) as made:
        await begun(made, live(10))
        await asyncio.sleep(5)


async def test_an_imaged_that_restarts_keeps_the_disks_locked_and_goes_on(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        write(node, OLD)
        for switched in (False, True):
            with pytest.raises(TimeoutError):
                await killed(node, threads)
            guest_writes(node)
            async with snapshots(node, threads) as made, asyncio.TaskGroup() as group:
                group.create_task(node.disks.ensure(vm()))
                do = "ensure" if switched else "cancel"
                state = await made.do(live(10, do=do, switched=switched))
                assert state.state == ("done" if switched else "none")
        assert (has(node), frozen(node, 10)) == ({NEW}, {OLD})


async def test_a_crash_at_any_write_leaves_a_snapshot_or_none_and_all_content(
    make_node: NodeMaker, threads: DiskThreads, crashes: Crashes
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        write(node, OLD)
        point, more = 0, True
        while more:
            number = 10 + point
            async with snapshots(node, threads) as made:
                more = await crashed(made, layered(number, disks=DISKS), crashes, point)
            async with snapshots(node, threads) as made:
                disks = (await node.disks.ensure(vm())).ready.disks  # waits for the rest
                whole = (folder(node, number) / "record.json").exists()
                assert whole == folder(node, number).exists()
                assert not any(path.exists() for path in staged(node))
                assert len({len(disk.layers) for disk in disks.values()}) == 1
                assert bool(disks["own"].layers) == whole
                assert (frozen(node, number) if whole else has(node)) == {OLD}
                assert (await ended(made, layered(number))).state == "done"
                back = number + 1000
                assert (await ended(made, work(back, number))).state == "done"
                for one in (number, back):
                    await made.release(snapshot(one))
            shutil.copy(layers(node, number)[0], files(node)[0])
            shutil.copy(layers(node, number)[1], files(node)[1])
            point += 1
        assert point > 12


async def test_a_restore_rests_on_the_layer_and_copies_nothing(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    of_image = record(volume(server.url("a")), uid=VM)
    disks = [SnapshotDisk(name="root")]
    async with make_node() as node, snapshots(node, threads) as made:
        first = (await node.disks.ensure(of_image)).ready.disks["root"]
        await ended(made, layered(10, disks=disks))
        await ended(made, work(11, 10, disks=disks))
        state = await ended(made, work(12, 10, disks=disks))
        assert state.done_bytes == 0
        disk = (await node.disks.ensure(of_image)).ready.disks["root"]
        assert (disk.digest, disk.image_format) == (first.digest, first.image_format)
        assert disk.layers == (f"{uid(10)}.root.qcow2",)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        assert await node.disks.collect_garbage(0.0) == ()


async def test_a_chain_is_bounded(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        for number in range(MAX_LAYERS):
            await ended(made, layered(100 + number))
        assert await refused(ended(made, layered(99))) == "chain_too_long"
        assert nothing_is_left(node, 99)
        assert len((await node.disks.ensure(vm())).ready.disks["own"].layers) == MAX_LAYERS


async def test_a_full_pool_refuses_the_snapshot_first(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm())
        async with snapshots(node, threads, SpaceLimits(min_free_bytes=2**62)) as made:
            for want in (layered(10), live(11)):
                assert await refused(ended(made, want)) == "disk_full"
                assert nothing_is_left(node, int(want.id[-12:], 16))


@REAL
async def test_the_content_of_each_state_is_the_one_of_its_instant(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    def io(path: Path, *commands: str) -> None:
        more = [part for command in commands for part in ("-c", command)]
        done = subprocess.run(["qemu-io", *more, str(path)], capture_output=True, check=True)
        assert b"fail" not in done.stdout

    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(vm())
        own = files(node)[0]
        for number, pattern in enumerate((0x11, 0x22, 0x33)):
            io(own, f"write -P {pattern} {number}M 1M", f"write -P {pattern} 4M 64k")
            await ended(made, layered(10 + number))
        io(own, "read -P 0x11 0 1M", "read -P 0x22 1M 1M", "read -P 0x33 4M 64k")
        await ended(made, work(20, 11))
        io(own, "read -P 0x22 1M 1M", "read -P 0 2M 1M", "read -P 0x22 4M 64k")
        io(own, "write -P 0x44 4M 64k")
        await ended(made, work(21, 20))
        io(own, "read -P 0x33 4M 64k")
        for layer in LayerFolder(node.files.root).names():
            path = node.state / "disks" / "layers" / layer
            subprocess.run(["qemu-img", "check", "-q", str(path)], check=True)
        assert OF.folder
