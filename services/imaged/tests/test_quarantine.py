"""Disks without a record are kept, listed, given back, or purged by name (ADR 0033)."""

import hashlib
import shutil
from pathlib import Path

import pytest
from services.imaged.tests.records import UID, empty, record, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.imaged.edge.quarantine import QuarantineFiles
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import ANY_EPOCH
from virtbus.schemas.quarantine import QuarantineRequest

WANTED = record(empty(8 * MIB))
KEEP = QuarantineRequest(why="the bus has no record of it", record=WANTED)


def write(node: Node, of: str = UID, text: bytes = b"the guest's own") -> str:
    """Write to a disk as a guest does; return the digest of the whole file."""
    disk = node.state / "disks" / of / "data.qcow2"
    with disk.open("ab") as file:
        file.write(text)
    return digest(disk)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_a_disk_with_writes_is_kept_whole_and_listed(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        whole = write(node)
        gone = await node.disks.release(UID, 1, KEEP)
        assert gone.kept == UID
        (kept,) = await node.disks.quarantined()
        assert (kept.entry, kept.uid, kept.name) == (UID, UID, WANTED.name)
        assert (kept.disks, kept.why, kept.adoptable) == (("data",), KEEP.why, True)
        assert kept.bytes > 0
        assert kept.since_ns > 0
        assert await node.disks.held() == {}
        assert digest(node.state / "disks" / "quarantine" / UID / "data.qcow2") == whole


async def test_a_disk_without_writes_is_not_kept(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        assert (await node.disks.release(UID, 1, KEEP)).kept == ""
        assert await node.disks.quarantined() == []
        assert await node.disks.held() == {}


async def test_a_keep_that_is_repeated_finds_its_entry_and_another_gets_its_own(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        first = write(node)
        assert (await node.disks.release(UID, 1, KEEP)).kept == UID
        assert (await node.disks.release(UID, 1, KEEP)).kept == UID  # its answer was lost
        await node.disks.ensure(record(empty(8 * MIB), epoch=2))
        second = write(node, text=b"of another life")
        assert (await node.disks.release(UID, 2, KEEP)).kept == f"{UID}.2"
        folder = node.state / "disks" / "quarantine"
        found = [digest(folder / entry / "data.qcow2") for entry in (UID, f"{UID}.2")]
        assert found == [first, second]


async def test_a_release_without_keep_removes_the_disks_and_no_entry(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        write(node)
        await node.disks.release(UID, 1, KEEP)
        await node.disks.ensure(record(empty(8 * MIB), epoch=2))
        write(node)
        assert (await node.disks.release(UID, ANY_EPOCH)).found
        assert [kept.entry for kept in await node.disks.quarantined()] == [UID]


async def test_an_entry_returns_to_its_vm_and_the_replaced_disks_are_kept(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        whole = write(node)
        await node.disks.release(UID, 1, KEEP)
        await node.disks.ensure(record(empty(8 * MIB), epoch=2))
        other = write(node, text=b"what the VM wrote since")
        await node.disks.restore(UID, UID, QuarantineRequest(why="replaced"))
        assert digest(node.state / "disks" / UID / "data.qcow2") == whole
        (kept,) = await node.disks.quarantined()
        assert kept.entry == f"{UID}.2"
        assert digest(node.state / "disks" / "quarantine" / kept.entry / "data.qcow2") == other
        done = await node.disks.ensure(record(empty(8 * MIB), epoch=2))
        assert not done.made
        assert set(await node.disks.held()) == {UID}


async def test_an_entry_becomes_the_disks_of_a_new_vm(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        whole = write(node)
        await node.disks.release(UID, 1, KEEP)
        await node.disks.restore(UID, uid(5), QuarantineRequest(why="replaced"))
        assert digest(node.state / "disks" / uid(5) / "data.qcow2") == whole
        assert await node.disks.quarantined() == []


async def test_a_purge_removes_the_entry_that_it_names_and_no_other(make_node: NodeMaker) -> None:
    async with make_node() as node:
        for number in (1, 2):
            await node.disks.ensure(record(empty(8 * MIB), uid=uid(number)))
            write(node, uid(number))
            await node.disks.release(uid(number), 1, KEEP)
        await node.disks.purge(uid(1))
        assert [kept.entry for kept in await node.disks.quarantined()] == [uid(2)]
        with pytest.raises(VirtbusError) as caught:
            await node.disks.purge(uid(1))
        assert caught.value.reason == "no_entry"


async def test_the_image_under_a_disk_in_quarantine_is_not_collected(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    wanted = record(volume(server.url("a"), 32 * MIB))
    async with make_node() as node:
        done = await node.disks.ensure(wanted)
        with (node.state / "disks" / UID / "root.qcow2").open("ab") as file:
            file.write(b"written")
        await node.disks.release(UID, 1, KEEP)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        assert await node.disks.collect_garbage(0.0) == ()
        (kept,) = await node.disks.quarantined()
        assert kept.digests == (done.ready.digest,)
        await node.disks.purge(kept.entry)
        assert await node.disks.collect_garbage(0.0) == (done.ready.digest,)


@pytest.mark.parametrize("step", ["_folder", "_manifest", "_found"])
async def test_a_list_leaves_out_an_entry_that_is_purged_meanwhile(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with make_node() as node:
        for number in (1, 2):
            await node.disks.ensure(record(empty(8 * MIB), uid=uid(number)))
            write(node, uid(number))
            await node.disks.release(uid(number), 1, KEEP)
        read = getattr(QuarantineFiles, step)

        def purged(files: QuarantineFiles, entry: str) -> object:
            shutil.rmtree(files.root / uid(1), ignore_errors=True)
            return read(files, entry)

        monkeypatch.setattr(QuarantineFiles, step, purged)
        assert [kept.entry for kept in await node.disks.quarantined()] == [uid(2)]


async def test_a_search_for_disks_leaves_out_a_folder_that_is_removed_meanwhile(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_node() as node:
        for number in (1, 2, 3):
            await node.disks.ensure(record(empty(8 * MIB), uid=uid(number)))
        write(node, uid(3))
        await node.disks.release(uid(3), 1, KEEP)
        is_dir = Path.is_dir

        def removed(path: Path) -> bool:
            there = is_dir(path)
            if path.name in {uid(1), uid(3)}:
                shutil.rmtree(path, ignore_errors=True)
            return there

        monkeypatch.setattr(Path, "is_dir", removed)
        assert set(await node.disks.held()) == {uid(2)}
        assert await node.disks.collect_garbage(0.0) == ()


async def test_an_entry_outlives_imaged(make_node: NodeMaker) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        write(node)
        await node.disks.release(UID, 1, KEEP)
        state = node.state
    async with make_node(state=state) as node:
        (kept,) = await node.disks.quarantined()
        entry, saved = await node.disks.kept(kept.entry)
        assert entry == kept
        assert saved == WANTED


async def test_an_entry_whose_manifest_is_damaged_is_listed_and_can_be_purged(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        await node.disks.ensure(WANTED)
        write(node)
        await node.disks.release(UID, 1, KEEP)
        (node.state / "disks" / "quarantine" / UID / "_manifest.json").write_bytes(b"\xff")
        (kept,) = await node.disks.quarantined()
        assert (kept.uid, kept.adoptable, kept.disks) == (UID, False, ("data",))
        await node.disks.purge(UID)
        assert await node.disks.quarantined() == []
