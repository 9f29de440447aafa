"""imaged dies at each write of a merge: no content is lost, and a repeat completes the merge."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services.imaged.tests.site_under_test import Node, NodeMaker
from services.imaged.tests.test_clone_crashes import content_of
from services.imaged.tests.test_flattening import flattening, hidden, merge, merged
from services.imaged.tests.test_layered_snapshots import layered, layers
from services.imaged.tests.test_snapshots import DISKS, OLD, ended, files, snapshots, vm, write
from services.imaged.tests.test_upload_crashes import MOST, Death, dying

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource

BACKING = 8
"""Position of the place and length of the backing file's name in a header."""
USERS = pytest.mark.parametrize("user", [0, 1000])


async def pulls(
    source: ExportSource,
    image: Path | None,
    limits: TransferLimits,
    look: Callable[[], Awaitable[None]],
) -> None:
    """Copy a layer's content, then change the header by one write, as QEMU does."""
    assert image is None
    del limits
    os.pwrite(source.disk, OLD, os.fstat(source.disk).st_size)
    await look()
    os.fdatasync(source.disk)
    os.pwrite(source.disk, bytes(12), BACKING)


async def on_layers(node: Node, threads: DiskThreads) -> None:
    await node.disks.ensure(vm())
    write(node, OLD)
    async with snapshots(node, threads) as made:
        await ended(made, layered(10))


async def rest(node: Node) -> set[str]:
    """Return the disks that rest on layers, as imaged tells the agent."""
    found = (await node.disks.ensure(vm())).ready.disks
    return {name for name, disk in found.items() if disk.layers}


@USERS
async def test_a_crash_at_any_write_of_a_merge_leaves_each_disk_whole(
    make_node: NodeMaker,
    threads: DiskThreads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: int,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    seen: set[int] = set()
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            await on_layers(node, threads)
            with dying(death):
                async with flattening(node, threads, flattener=pulls) as made:
                    await merged(made, merge())
        async with make_node(state=state) as node:
            seen.add(len(await rest(node)))
            assert {content_of(node, path) for path in files(node)} == {OLD}, f"after {last}"
            async with flattening(node, threads, flattener=pulls) as made:
                assert (await merged(made, merge())).state == "done"
            assert await rest(node) == set(), f"after {last} writes"
            assert all(path.read_bytes().endswith(OLD) for path in files(node))
            assert all(path.read_bytes().endswith(OLD) for path in layers(node, 10))
        if death.left >= 0:
            break  # it wrote no more than that
    assert seen == {0, 1, 2}, "disks that rested on their layers after a crash"


async def test_a_crash_at_any_write_of_a_note_of_a_merge_is_repaired_by_a_repeat(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The QEMU of a guest has merged the layers; imaged cannot read the disks' headers."""
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        with monkeypatch.context() as own_user:
            own_user.setattr(os, "geteuid", lambda: 1000)
            async with make_node(state=state) as node:
                await on_layers(node, threads)
                found = {
                    disk.name: path.stat().st_ino
                    for disk, path in zip(DISKS, files(node), strict=True)
                }
                want = merge(live=True, merged=found)
                hidden(own_user)
                with dying(death):
                    async with flattening(node, threads) as made:
                        await made.do(want)
            async with make_node(state=state) as node, flattening(node, threads) as made:
                left = await rest(node)
                assert left <= {"own", "data"}
                assert left or last
                assert (await made.do(want)).state == "done"
                assert await rest(node) == set(), f"after {last} writes"
        if death.left >= 0:
            return
    pytest.fail(f"more than {MOST} writes")
