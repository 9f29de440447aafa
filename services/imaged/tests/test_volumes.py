"""Volumes on a host: made with a VM's disks, kept after it, grown, and removed by release only."""

import fcntl
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from struct import pack

import pytest
from services.imaged.tests.records import empty, named, record, ref, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.bus.runtime.image_locks import locked
from virtbus.imaged.core.growth import grown
from virtbus.imaged.core.overlay import build, read_overlay
from virtbus.imaged.edge import volume_files
from virtbus.imaged.edge.volume_files import VolumeFolders, VolumeNote
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ANY_EPOCH, HeldResources, HeldVolume
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import decode, validate

GIB = 1024 * MIB
A, B = uid(1), uid(2)


def holding(of: VolumeRef, vm: str = A) -> VmRecord:
    return record(named(), uid=vm, refs={"data": of})


def folder(node: Node) -> Path:
    return node.state / "disks" / "volumes" / f"default.data-1.{uid(77)}"


def disk(node: Node) -> Path:
    return folder(node) / "disk.qcow2"


def noted(node: Node) -> VolumeNote:
    return validate(VolumeNote, decode((folder(node) / "record.json").read_bytes()))


def checked(path: Path) -> None:
    if shutil.which("qemu-img"):
        subprocess.run(["qemu-img", "check", "-q", str(path)], check=True)


async def test_a_volume_outlives_its_vm_and_the_next_vm_finds_its_data(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        made = await node.disks.ensure(holding(ref(8 * MIB)))
        assert (made.made, made.ready.disks["data"].virtual_size_bytes) == (True, 8 * MIB)
        assert noted(node) == VolumeNote(ref=ref(8 * MIB), holder=A, epoch=1)
        with disk(node).open("ab") as file:
            file.write(b"guest")
        await node.disks.release(A, 1)
        assert disk(node).read_bytes().endswith(b"guest")
        again = await node.disks.ensure(holding(ref(8 * MIB), B))
        assert (again.made, noted(node).holder) == (False, B)
        assert disk(node).read_bytes().endswith(b"guest")


async def test_a_volume_keeps_its_image_from_the_garbage_collection(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    of = ref(32 * MIB, server.url("a"))
    async with make_node() as node:
        made = (await node.disks.ensure(holding(of))).ready
        assert made.disks["data"].digest == made.digest == noted(node).digest
        await node.disks.release(A, 1)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        assert await node.disks.collect_garbage(0.0) == ()
        freed, users = await node.disks.forget_images(frozenset({made.digest}), ())
        assert (freed, users) == (0, (uid(77),))
        checked(disk(node))
        assert await node.disks.release_volume(of)
        assert await node.disks.collect_garbage(0.0) == (made.digest,)


async def test_only_a_release_of_the_volume_removes_it_and_may_be_repeated(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        one = record(named(), empty(8 * MIB, "own"), uid=A, refs={"data": ref(8 * MIB)})
        await node.disks.ensure(one)
        assert set(await node.disks.held()) == {A}  # audits and sweeps never see a volume
        with (node.state / "disks" / A / "own.qcow2").open("ab") as file:
            file.write(b"guest")
        keep = QuarantineRequest(why="absent", record=one)
        assert (await node.disks.release(A, ANY_EPOCH, keep)).kept == A
        assert disk(node).exists()
        assert await node.disks.release_volume(ref(8 * MIB))
        assert not folder(node).exists()
        assert not await node.disks.release_volume(ref(8 * MIB))


async def test_a_volume_that_a_vm_of_the_host_still_has_is_not_removed(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(ref(8 * MIB)))
        pin = node.state / "pin"
        pin.hardlink_to(disk(node))  # the agent's second name of a disk
        with pytest.raises(VirtbusError) as refused:
            await node.disks.release_volume(ref(8 * MIB))
        assert (refused.value.code, refused.value.reason) == (Code.CONFLICT, "volume_in_use")
        pin.unlink()
        assert await node.disks.release_volume(ref(8 * MIB))


async def test_a_volume_grows_with_its_data_and_never_shrinks(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(ref(8 * MIB)))
        if shutil.which("qemu-io"):
            write = ["qemu-io", "-f", "qcow2", "-c", "write -P 7 7M 1M", str(disk(node))]
            subprocess.run(write, check=True, capture_output=True)
        grown_to = await node.disks.ensure(holding(ref(600 * GIB), B))
        assert grown_to.ready.disks["data"].virtual_size_bytes == 600 * GIB
        assert noted(node).ref.size_bytes == 600 * GIB
        checked(disk(node))
        if shutil.which("qemu-io"):
            for part in ("read -P 7 7M 1M", "write -P 8 599G 1M", "read -P 8 599G 1M"):
                run = ["qemu-io", "-f", "qcow2", "-c", part, str(disk(node))]
                out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
                assert "failed" not in out
            checked(disk(node))
        kept = await node.disks.ensure(holding(ref(8 * MIB), B))
        assert kept.ready.disks["data"].virtual_size_bytes == 600 * GIB


@pytest.mark.integration
async def test_a_disk_with_the_bitmap_of_a_backup_still_opens_after_it_grew(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(ref(8 * MIB)))
        add = ["qemu-img", "bitmap", "--add", str(disk(node)), "virtbus-x"]
        subprocess.run(add, check=True)
        await node.disks.ensure(holding(ref(100 * GIB), B))
        for part in ("write -P 7 99G 1M", "read -P 7 99G 1M"):
            run = ["qemu-io", "-f", "qcow2", "-c", part, str(disk(node))]
            done = subprocess.run(run, check=True, capture_output=True, text=True)
            assert "failed" not in done.stdout
        info = json.loads(subprocess.check_output(
            ["qemu-img", "info", "--output=json", str(disk(node))]
        ))  # fmt: skip
        assert "bitmaps" not in info["format-specific"]["data"]


async def test_a_disk_that_a_qemu_has_open_grows_by_that_qemu_or_later(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        both = partial(record, named(), uid=A)
        await node.disks.ensure(both(empty(8 * MIB, "own"), refs={"data": ref(8 * MIB)}))
        own = node.state / "disks" / A / "own.qcow2"
        larger = both(empty(16 * MIB, "own"), refs={"data": ref(16 * MIB)})
        with disk(node).open("rb") as of_volume, own.open("rb") as of_vm:
            before = disk(node).read_bytes(), own.read_bytes()
            for file in (of_volume, of_vm):
                assert not locked(file.fileno())
                lock = pack("hhqqi4x", fcntl.F_RDLCK, 0, 100, 1, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
            made = (await node.disks.ensure(larger)).ready.disks
            assert {one.virtual_size_bytes for one in made.values()} == {8 * MIB}
            assert (disk(node).read_bytes(), own.read_bytes()) == before
        made = (await node.disks.ensure(larger)).ready.disks
        assert {one.virtual_size_bytes for one in made.values()} == {16 * MIB}
        checked(disk(node))
        checked(own)


def test_a_disk_grows_as_far_as_its_tables_reach() -> None:
    head = build(8 * MIB).pieces[0][1].ljust(4096, b"\0")
    offset, data = grown(head, 4096 * GIB)
    longer = head[:offset] + data + head[offset + len(data) :]
    assert read_overlay(longer).virtual_size_bytes == 4096 * GIB
    assert offset + len(data) <= 512  # one sector, so that a crash leaves the old or the new size
    for size in (4096 * GIB + 1, 4 * MIB):
        with pytest.raises(VirtbusError) as refused:
            grown(head, size)
        assert refused.value.reason == "cannot_grow"


async def test_a_crash_before_the_disk_is_visible_is_repeated(make_node: NodeMaker) -> None:
    async with make_node() as node:
        files = VolumeFolders(node.state / "disks")
        files.note(VolumeNote(ref=ref(8 * MIB), holder=A, epoch=1))
        assert not disk(node).exists()
        assert (await node.disks.ensure(holding(ref(8 * MIB)))).made
        (folder(node) / ".tmp-record.json").write_bytes(b"cut")
        assert await node.disks.release_volume(ref(8 * MIB))
        assert not folder(node).exists()


async def test_a_volume_of_another_image_is_refused_and_left(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    async with make_node() as node:
        await node.disks.ensure(holding(ref(32 * MIB)))
        with pytest.raises(VirtbusError) as refused:
            await node.disks.ensure(holding(ref(32 * MIB, server.url("a")), B))
        assert refused.value.reason == "disk_mismatch"
        assert disk(node).exists()


async def test_a_spec_whose_record_does_not_describe_the_volume_makes_nothing(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        with pytest.raises(VirtbusError) as refused:
            await node.disks.ensure(record(named(), uid=A))
        assert refused.value.reason == "volume_unknown"
        assert not (node.state / "disks" / "volumes").exists()


async def test_two_volumes_of_one_uid_have_two_folders(make_node: NodeMaker) -> None:
    refs = {"a": ref(8 * MIB), "b": ref(8 * MIB, name="data-2")}
    async with make_node() as node:
        await node.disks.ensure(record(named("a"), named("b", "data-2"), uid=A, refs=refs))
        assert len(list((node.state / "disks" / "volumes").iterdir())) == 2


async def test_a_volume_smaller_than_its_image_is_refused(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    async with make_node() as node:
        image = (await node.disks.ensure(record(volume(server.url("a"))))).ready
        small = image.disks["root"].virtual_size_bytes - 512
        with pytest.raises(VirtbusError) as refused:
            await node.disks.ensure(holding(ref(small, server.url("a")), B))
        assert refused.value.reason == "disk_too_small"


async def test_a_vm_that_still_waits_for_its_image_does_not_make_a_deleted_volume_again(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(holding(ref(8 * MIB)))
        assert await node.disks.release_volume(ref(8 * MIB))
        with pytest.raises(VirtbusError, match="was deleted") as refused:
            await node.disks.ensure(holding(ref(8 * MIB)))
        assert refused.value.reason == "released"
        assert not folder(node).exists()


async def test_the_volumes_of_a_host_are_listed_in_pages(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_files, "PAGE", 1)
    async with make_node() as node:
        assert await node.disks.held_volumes("") == HeldResources()
        await node.disks.ensure(holding(ref(8 * MIB)))
        torn = folder(node).with_name(f"shop.torn.{uid(5)}")
        torn.mkdir()
        page = await node.disks.held_volumes("")
        assert (page.volumes, page.more) == (
            (HeldVolume(folder=folder(node).name, ref=ref(8 * MIB), holder=A),),
            True,
        )
        rest = await node.disks.held_volumes(folder(node).name)
        assert (rest.volumes, rest.more) == ((HeldVolume(folder=torn.name),), False)
