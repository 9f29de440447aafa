"""A layer stays as long as anything needs it, and is unneeded afterwards."""

from services.imaged.tests.records import uid
from services.imaged.tests.site_under_test import NodeMaker
from services.imaged.tests.test_layered_snapshots import layered, layers
from services.imaged.tests.test_snapshots import (
    OF,
    VM,
    ended,
    files,
    snapshot,
    snapshots,
    vm,
    work,
)

from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.schemas.quarantine import QuarantineRequest


async def test_disks_snapshots_and_the_quarantine_need_their_layers(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        sweep = LayerSweep(SnapshotFolders(node.files.root), node.disks.users.found, threads)

        async def unneeded() -> set[str]:
            await sweep.unneeded()
            return set((await sweep.unneeded()).names)

        await node.disks.ensure(vm())
        await ended(made, layered(10))
        await ended(made, layered(11))
        first, second = ({path.name for path in layers(node, number)} for number in (10, 11))
        await made.release(snapshot(10))
        assert await unneeded() == set()  # the disk and the second layer rest on them
        await ended(made, work(12, 11))
        await made.release(snapshot(11))
        assert await unneeded() == set()
        keep = QuarantineRequest(why="test")
        entry = (await node.disks.release(VM, 1, keep)).kept
        assert entry
        assert await unneeded() == set()
        await node.disks.purge(entry)
        assert await unneeded() == set()  # the replaced disks and the volume
        await made.release(snapshot(12))
        own = {name for name in first | second if ".own." in name}
        assert await unneeded() == own
        await node.disks.release_volume(OF)
        assert await unneeded() == first | second


async def test_one_search_alone_removes_nothing(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        sweep = LayerSweep(SnapshotFolders(node.files.root), node.disks.users.found, threads)
        await node.disks.ensure(vm())
        await ended(made, layered(10))
        await made.release(snapshot(10))
        await node.disks.release(VM, 1)
        assert (await sweep.unneeded()).names == ()
        assert (await sweep.unneeded()).names == (f"{uid(10)}.own.qcow2",)


async def test_a_header_that_cannot_be_read_keeps_all_layers(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, snapshots(node, threads) as made:
        sweep = LayerSweep(SnapshotFolders(node.files.root), node.disks.users.found, threads)
        await node.disks.ensure(vm())
        await ended(made, layered(10))
        await made.release(snapshot(10))
        files(node)[0].write_bytes(b"torn")
        for _ in range(3):
            assert (await sweep.unneeded()).names == ()
