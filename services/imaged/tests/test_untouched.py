"""Events that concern a VM or a pool leave snapshots, exports, backups and layers as they are.

A stop keeps the disks of a VM, a drain releases them, and a return after a fence quarantines them.
"""

from collections.abc import Awaitable, Callable

import pytest
from services.imaged.tests import test_backups as backups
from services.imaged.tests import test_exports as exports
from services.imaged.tests.records import empty, record, ref, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker
from services.imaged.tests.test_snapshots import (
    OLD,
    VM,
    ended,
    snapshots,
    vm,
    work,
    write,
)

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import ANY_EPOCH
from virtbus.schemas.quarantine import QuarantineRequest

KEEP = QuarantineRequest(why="test")
FULL = SpaceLimits(1 << 60, 0.0)
Event = Callable[[Node, DiskThreads], Awaitable[None]]


async def made_all(node: Node, threads: DiskThreads) -> None:
    """A VM with a volume, of which there is each kind of data; another VM is in quarantine."""
    await node.disks.ensure(record(empty(MIB), uid=uid(2)))
    with node.files.path(uid(2), "data").open("ab") as disk:
        disk.write(OLD)
    await node.disks.release(uid(2), 1, KEEP)
    await node.disks.ensure(vm())
    write(node, OLD)
    async with snapshots(node, threads) as made:
        await ended(made, work(10))
        await ended(made, work(11, layered=True))
    async with exports.exporting(node, threads, exports.Copies()) as exporting:
        await exports.ended(exporting, exports.work(disk="own"))
    async with backups.backing_up(node, threads) as backing_up:
        await backups.ended(backing_up, backups.work(12, disks=[{"name": "own"}]))


def data(node: Node) -> dict[str, bytes]:
    """Return the files of all data but the own disks of the VM."""
    kinds = ("snapshots", "layers", "exports", "quarantine", "volumes")
    roots = [backups.store(node), *(node.state / "disks" / kind for kind in kinds)]
    found = {root.name: [one for one in root.rglob("*") if one.is_file()] for root in roots}
    assert all(found.values()), found
    return {str(path): path.read_bytes() for paths in found.values() for path in paths}


def own_disk(node: Node) -> bytes:
    path = node.files.path(VM, "own")
    return path.read_bytes() if path.exists() else b""


async def stopped(node: Node, _: DiskThreads) -> None:
    await node.disks.ensure(vm())  # its next start


async def drained(node: Node, _: DiskThreads) -> None:
    assert (await node.disks.release(VM, 1)).found


async def fenced(node: Node, _: DiskThreads) -> None:
    """Its VM was moved: the node keeps its disks when it returns."""
    assert (await node.disks.release(VM, ANY_EPOCH, KEEP)).kept == VM
    assert [one.entry for one in await node.disks.quarantined()] == [VM, uid(2)]


async def rebuilt(node: Node, threads: DiskThreads) -> None:
    """No record of the data is left: neither does imaged ask for one."""
    sweep = LayerSweep(SnapshotFolders(node.files.root), node.disks.users.found, threads)
    for _ in range(2):
        assert (await sweep.unneeded()).names == ()
    async with snapshots(node, threads), backups.backing_up(node, threads) as made:
        assert (await backups.held(made, 12)).manifest
    await node.disks.collect_garbage(0.0)


async def pool_is_gone(node: Node, _: DiskThreads) -> None:
    lost = ref(8 * MIB, name="lost").model_copy(update={"pool": "fast"})
    with pytest.raises(VirtbusError, match="no pool fast"):
        await node.disks.release_volume(lost)


async def disk_is_full(node: Node, threads: DiskThreads) -> None:
    async with snapshots(node, threads, FULL) as made:
        assert await backups.refused(ended(made, work(20))) == "disk_full"
        assert await backups.refused(ended(made, work(21, layered=True))) == "disk_full"
    async with exports.exporting(node, threads, exports.Copies(), FULL) as exporting:
        asked = exports.work(disk="own").model_copy(update={"id": uid(91)})
        assert await exports.refused(exports.ended(exporting, asked)) == "disk_full"
    async with backups.backing_up(node, threads, space=FULL) as backing_up:
        asked_backup = backups.work(13, disks=[{"name": "own"}])
        assert await backups.refused(backups.ended(backing_up, asked_backup)) == "disk_full"


KEEPING: tuple[Event, ...] = (stopped, rebuilt, pool_is_gone, disk_is_full)
"""The events that leave also the VM's own disks."""


@pytest.mark.parametrize("event", [drained, fenced, *KEEPING])
async def test_an_event_of_a_vm_or_a_pool_leaves_other_data(
    make_node: NodeMaker, threads: DiskThreads, event: Event
) -> None:
    async with make_node() as node:
        await made_all(node, threads)
        before, own = data(node), own_disk(node)
    async with make_node() as node:
        await event(node, threads)
        assert own_disk(node) == (own if event in KEEPING else b"")
        entry = f"quarantine/{VM}/"
        assert {name: is_ for name, is_ in data(node).items() if entry not in name} == before
