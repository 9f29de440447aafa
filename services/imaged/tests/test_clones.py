"""The own disks of a clone rest on the layers of its origin, and outlive it."""

import subprocess

import pytest
from services.imaged.tests.records import empty, record, uid, volume
from services.imaged.tests.site_under_test import MIB, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_layered_snapshots import layered
from services.imaged.tests.test_snapshots import VM, ended, snapshot, snapshots, work

from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.snapshot import Origin, SnapshotDisk
from virtbus.schemas.vm import VmRecord

DISKS = (SnapshotDisk(name="root"),)


def of(number: int, source: int, at: str) -> VmRecord:
    """The clone `number` of a snapshot; `at` is the address of its image."""
    made = record(volume(at), empty(MIB, "more"), uid=uid(number))
    return made.model_copy(update={"origin": Origin(snapshot=snapshot(source), node="n1")})


@pytest.mark.parametrize("copied", [False, True])
async def test_a_clone_of_a_clone_outlives_the_snapshots_and_the_vms_below_it(
    make_node: NodeMaker, threads: DiskThreads, server: Web, copied: bool
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    at = server.url("a")
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(record(volume(at), uid=VM))
        root = node.state / "disks" / VM / "root.qcow2"
        root.write_bytes(root.read_bytes() + b"content")
        take = work if copied else layered
        await ended(made, take(10, disks=DISKS))
        first = (await node.disks.ensure(of(2, 10, at))).ready.disks
        assert first["root"].layers == (f"{uid(10)}.root.qcow2",)
        assert first["more"].layers == ()
        await ended(made, layered(11, uid=uid(2), disks=DISKS))
        server.files.clear()  # a clone needs no source
        second = (await node.disks.ensure(of(3, 11, at))).ready.disks
        assert second["root"].layers == (f"{uid(11)}.root.qcow2", f"{uid(10)}.root.qcow2")
        assert second["root"].digest == first["root"].digest
        for number in (10, 11):
            await made.release(snapshot(number))
        for gone in (VM, uid(2)):
            await node.disks.release(gone, 1)
        files = SnapshotFolders(node.files.root)
        sweep = LayerSweep(files, node.disks.users.found, threads)
        for _ in range(3):
            assert (await sweep.unneeded()).names == ()
        assert (await node.disks.ensure(of(3, 11, at))).ready.disks == second
        layer = node.state / "disks" / "layers" / f"{uid(10)}.root.qcow2"
        assert layer.read_bytes().endswith(b"content")
        await node.disks.release(uid(3), 1)
        await sweep.unneeded()
        assert len((await sweep.unneeded()).names) == 2


async def test_a_clone_of_a_deleted_snapshot_says_so(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    async with make_node() as node, snapshots(node, threads):
        with pytest.raises(VirtbusError) as refused:
            await node.disks.ensure(of(2, 10, server.url("a")))
        assert refused.value.reason == "snapshot_missing"
        assert "clone it from another snapshot" in str(refused.value)


@pytest.mark.integration  # it needs qemu-io
async def test_a_clone_keeps_what_it_wrote_and_its_source_does_not_see_it(
    make_node: NodeMaker, threads: DiskThreads, server: Web
) -> None:
    def io(vm: str, *commands: str) -> None:
        more = [part for command in commands for part in ("-c", command)]
        path = str(node.state / "disks" / vm / "root.qcow2")
        done = subprocess.run(["qemu-io", *more, path], capture_output=True, check=True)
        assert b"fail" not in done.stdout

    server.files["a"] = qcow2_image(payload=0)
    at = server.url("a")
    async with make_node() as node, snapshots(node, threads) as made:
        await node.disks.ensure(record(volume(at), uid=VM))
        io(VM, "write -P 0x11 0 64k")
        await ended(made, layered(10, disks=DISKS))
        clone = of(2, 10, at)
        await node.disks.ensure(clone)
        io(uid(2), "read -P 0x11 0 64k", "write -P 0x22 0 64k")
        io(VM, "write -P 0x33 0 64k")
        await made.release(snapshot(10))
        assert not (await node.disks.ensure(clone)).made
        io(uid(2), "read -P 0x22 0 64k")
        io(VM, "read -P 0x33 0 64k")
