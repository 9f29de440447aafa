"""imaged dies at each write of a clone or a restore: its source stays, and a repeat completes it.

Linked clones rest on the layers of a snapshot; full ones copy a snapshot, and restores a backup.
"""

from pathlib import Path

import pytest
from services.imaged.tests.filling import AT, CONTENT, Copies, filling, folder, names
from services.imaged.tests.filling import ended as filled
from services.imaged.tests.filling import work as fill
from services.imaged.tests.records import empty, record, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker
from services.imaged.tests.test_backups import SIZE, backing_up, pushed
from services.imaged.tests.test_backups import VM as BACKED_UP
from services.imaged.tests.test_fills_of_snapshots import copied
from services.imaged.tests.test_snapshots import (
    NEW,
    OLD,
    VM,
    Crashes,
    crashed,
    crashes,
    ended,
    files,
    has,
    kept,
    snapshot,
    snapshots,
    vm,
    work,
    write,
)
from services.imaged.tests.test_upload_crashes import MOST, Death, dying

from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.schemas.snapshot import Origin
from virtbus.schemas.vm import VmRecord

__all__ = ["crashes"]  # a fixture


def clone() -> VmRecord:
    """A VM with the disk `own` of the snapshot, and an empty one."""
    made = record(empty(8 * MIB, "own"), empty(MIB, "more"), uid=uid(2))
    return made.model_copy(update={"origin": Origin(snapshot=snapshot(10), node="n1")})


async def taken(node: Node, threads: DiskThreads, *, layered: bool) -> None:
    """Take the snapshot 10 of disks with OLD, which then get NEW."""
    await node.disks.ensure(vm())
    write(node, OLD)
    async with snapshots(node, threads) as made:
        await ended(made, work(10, layered=layered))
        await node.disks.ensure(vm())
    write(node, NEW)


def layers(node: Node) -> list[Path]:
    return sorted((node.state / "disks" / "layers").glob("*"))


@pytest.mark.parametrize("layered", [False, True])
async def test_a_crash_at_any_write_of_a_linked_clone_leaves_no_half_disk(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path, layered: bool
) -> None:
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            await taken(node, threads, layered=layered)
            with dying(death):
                await node.disks.ensure(clone())
        async with make_node(state=state) as node, snapshots(node, threads) as made:
            disks = (await node.disks.ensure(clone())).ready.disks
            (layer,) = disks["own"].layers
            assert (node.state / "disks/layers" / layer).read_bytes().endswith(OLD)
            assert disks["more"].layers == ()
            there = sorted(path.name for path in (node.state / "disks" / uid(2)).iterdir())
            assert there == ["more.qcow2", "own.qcow2"], f"left after {last} writes"
            assert has(node) == {NEW}
            await made.release(snapshot(10))
            await node.disks.release(uid(2), 1)
            await node.disks.release(VM, 1)
            sweep = LayerSweep(SnapshotFolders(node.files.root), node.disks.users.found, threads)
            await sweep.unneeded()
            unneeded = set((await sweep.unneeded()).names)
            rest = {path.name for path in layers(node)} - unneeded
            # the named volume `data` of the first VM stays, with its layer
            assert rest == ({f"{uid(10)}.data.qcow2"} if layered else set()), f"after {last}"
        if death.left >= 0:
            return  # it wrote no more than that
    pytest.fail(f"more than {MOST} writes")


async def test_a_crash_at_any_write_of_a_restore_of_layers_replaces_all_disks_or_none(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path, crashes: Crashes
) -> None:
    seen, last, more = set(), 0, True
    while more:
        state = tmp_path / f"state-{last}"
        async with make_node(state=state) as node:
            await taken(node, threads, layered=True)
            async with snapshots(node, threads) as made:
                more = await crashed(made, work(11, 10), crashes, last)
        async with make_node(state=state) as node, snapshots(node, threads) as made:
            await node.disks.ensure(vm())  # waits for a restore that continues
            now = {content_of(node, path) for path in files(node)}
            assert len(now) == 1, f"{now} after {last} writes"
            seen |= now
            assert (await ended(made, work(11, 10))).state == "done"
            await node.disks.ensure(vm())
            assert {content_of(node, path) for path in files(node)} == {OLD}
            assert kept(node, 11) == (NEW, NEW)
            assert not list((node.state / "disks").glob("**/.new-*"))
        last += 1
    assert seen == {OLD, NEW}


def content_of(node: Node, disk: Path) -> bytes:
    """Return the end of a disk, or of the layer below it if it is empty."""
    data = disk.read_bytes()
    if data.endswith((OLD, NEW)):
        return data[-len(OLD) :]
    (layer,) = [path for path in layers(node) if path.name.encode() in data]
    return layer.read_bytes()[-len(OLD) :]


@pytest.mark.parametrize("then", ["ensure", "cancel", "release"])
@pytest.mark.parametrize("source", ["copy", "layer", "backup"])
async def test_a_crash_at_any_write_of_a_full_copy_leaves_nothing_partial(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path, source: str, then: str
) -> None:
    fields = (
        {"backup": uid(10), "disk": "data"} if source == "backup" else {"snapshot": snapshot(10)}
    )
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node, backing_up(node, threads) as backups:
            if source == "backup":
                disks = (empty(SIZE), empty(SIZE, "more"))
                await node.disks.ensure(record(*disks, uid=BACKED_UP))
                await pushed(backups, node, 10)
            else:
                await taken(node, threads, layered=source == "layer")
            with dying(death):
                async with filling(node, threads, Copies(), backups=backups.checks) as fills:
                    await filled(fills, fill(copied(), **fields))
        async with (
            make_node(state=state) as node,
            backing_up(node, threads) as backups,
            filling(node, threads, Copies(), backups=backups.checks) as fills,
        ):
            whole = "disk.qcow2" in names(node, copied())
            if whole:
                content = (folder(node, copied()) / "disk.qcow2").read_bytes()
                assert content[AT : AT + len(CONTENT)] == CONTENT, f"after {last} writes"
            if then == "release":
                await node.disks.release_volume(copied())
                assert names(node, copied()) == []
            else:
                done = await filled(fills, fill(copied(), then, **fields))
                expected = whole or then == "ensure"
                assert (done.state == "done") == expected
                left = ["disk.qcow2", "record.json"] if expected else []
                assert names(node, copied()) == left, f"after {last} writes"
        if death.left >= 0:
            return
    pytest.fail(f"more than {MOST} writes")
