"""The file of a shared volume: raw, made once, read by nobody but guests, removed by release."""

from pathlib import Path

import pytest
from services.imaged.tests.records import named, record, ref, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker

from virtbus.imaged.core.overlay import build
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.node_rpc import HeldVolume
from virtbus.schemas.vm import VmRecord

A, B = uid(1), uid(2)
SHARED = ref(8 * MIB).model_copy(update={"shared": True})


def holding(vm: str) -> VmRecord:
    return record(named(), uid=vm, refs={"data": SHARED})


def folder(node: Node) -> Path:
    return node.state / "disks" / "volumes" / SHARED.folder


async def test_two_vms_get_one_raw_file_and_keep_its_content(make_node: NodeMaker) -> None:
    async with make_node() as node:
        first = await node.disks.ensure(holding(A))
        file = folder(node) / "disk.raw"
        assert (first.made, file.read_bytes()) == (True, bytes(8 * MIB))
        assert file.stat().st_blocks == 0
        header = build(2**40, "/etc/shadow", ImageFormat.RAW).pieces[0][
            1
        ]  # a guest may write anything
        with file.open("r+b") as guest:
            guest.write(header)
        second = await node.disks.ensure(holding(B))
        assert (second.made, second.ready.disks) == (False, first.ready.disks)
        assert second.ready.disks["data"].virtual_size_bytes == 8 * MIB
        await node.disks.release(A, 1)
        assert file.read_bytes().startswith(header)
        assert {one.name for one in folder(node).iterdir()} == {"disk.raw", "record.json"}
        assert await node.disks.collect_garbage(0.0) == ()
        (held,) = (await node.disks.held_volumes("")).volumes
        assert held == HeldVolume(folder=SHARED.folder, ref=SHARED, holder=B)
        assert node.disks.pools.measure("local").allocated_bytes == 8 * MIB


async def test_it_is_removed_once_no_vm_has_it_and_is_not_made_again(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(A))
        pin = node.state / "pin"
        pin.hardlink_to(folder(node) / "disk.raw")
        with pytest.raises(VirtbusError) as refused:
            await node.disks.release_volume(SHARED)
        assert refused.value.reason == "volume_in_use"
        pin.unlink()
        assert await node.disks.release_volume(SHARED)
        assert not folder(node).exists()
        with pytest.raises(VirtbusError, match="was deleted"):
            await node.disks.ensure(holding(B))


async def test_a_crash_in_the_middle_leaves_no_second_name(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(A))
        file = folder(node) / "disk.raw"
        (folder(node) / ".tmp-disk.raw").hardlink_to(file)  # between link and unlink
        assert not (await node.disks.ensure(holding(B))).made
        assert file.stat().st_nlink == 1
        file.rename(folder(node) / ".tmp-disk.raw")  # before the link
        assert (await node.disks.ensure(holding(B))).made
        assert {one.name for one in folder(node).iterdir()} == {"disk.raw", "record.json"}
