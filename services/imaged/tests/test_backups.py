"""Backups: nothing partial is ever visible, each says what it is, and none is used unread."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import empty, record, uid
from services.imaged.tests.site_under_test import FAST, MIB, Node, NodeMaker
from services.imaged.tests.test_snapshots import CrashError, Crashes, crashes

from virtbus.imaged.backup_checks import BackupChecks
from virtbus.imaged.backups import BackupParts, Backups
from virtbus.imaged.core.limits import SpaceLimits, TransferLimits
from virtbus.imaged.core.overlay import build
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.backup_files import BackupFiles, expire
from virtbus.imaged.edge.backup_staging import BackupStaging
from virtbus.imaged.edge.digests import Digester
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.exports import Converter
from virtbus.schemas.backup import (
    BackupsAsk,
    BackupWork,
    HeldBackup,
    VerifyWork,
    bitmap_name,
)
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import ExportFormat

__all__ = ["crashes"]  # a fixture

VM = uid(1)
SIZE = 8 * MIB
DISKS = [{"name": "data", "size_bytes": SIZE}, {"name": "more", "size_bytes": SIZE}]


async def copies(
    source: ExportSource,
    target: int,
    format_: ExportFormat,
    limits: TransferLimits,
    look: Callable[[], Awaitable[None]],
    into: tuple[str, ...] = (),
) -> None:
    """Write an empty disk, as qemu-img does."""
    del format_, limits, into
    layout = build(source.virtual_size_bytes)
    for offset, data in layout.pieces:
        os.pwrite(target, data, offset)
    os.ftruncate(target, layout.length_bytes)
    await look()


class Made(Backups):
    """Backups with their verifications."""

    def __init__(self, jobs: DiskJobs, parts: BackupParts, converter: Converter) -> None:
        super().__init__(jobs, parts, converter)
        self.jobs = jobs
        self.checks = BackupChecks(jobs, parts)


@contextlib.asynccontextmanager
async def backing_up(
    node: Node,
    threads: DiskThreads,
    *,
    space: SpaceLimits | None = None,
    off: bool = False,
    converter: Converter = copies,
) -> AsyncIterator[Made]:
    root = store(node)
    if not root.exists():
        root.mkdir()
    limits = space or SpaceLimits(0, 0.0)
    parts = BackupParts(
        node.disks.locks,
        DiskPlaces(Pools(node.files), node.store),
        None if off else BackupFiles(node.files.root, root),
        BackupStaging(node.files.root),
        DiskSpace(node.files.root, limits),
        None if off else DiskSpace(root, limits),
        threads,
        FAST,
    )
    async with asyncio.TaskGroup() as group:
        jobs = DiskJobs(group)
        yield Made(jobs, parts, converter)


def store(node: Node) -> Path:
    return node.state / "backups"


def staged(node: Node, number: int) -> list[Path]:
    return sorted((node.files.root / "backups" / uid(number)).glob("*.qcow2"))


def work(number: int = 10, **more: Any) -> BackupWork:
    fields: dict[str, Any] = {"id": uid(number), "uid": VM, "namespace": "default", "name": "web"}
    fields |= {"node": "n1", "disks": DISKS, "spec": {"volumes": []}}
    return BackupWork.model_validate(fields | more)


def live(number: int = 10, **more: Any) -> BackupWork:
    return work(number, live=True, **more)


async def ended(made: Made, want: BackupWork) -> WorkState:
    while (state := await made.do(want)).state == "working":
        await asyncio.sleep(0.01)
    return state


async def verified(made: Made, number: int = 10) -> WorkState:
    want = VerifyWork(id=uid(90), backup=uid(number))
    while (state := await made.checks.verify(want)).state == "working":
        await asyncio.sleep(0.01)
    return state


async def pushed(made: Made, node: Node, number: int = 10, **more: Any) -> WorkState:
    """Stage the files, write them as QEMU does, and let imaged store them."""
    bitmaps = more.pop("bitmaps", ())
    state = await made.do(live(number, bitmaps=bitmaps, **more))
    assert (state.state, state.step) == ("working", "push")
    for path in staged(node, number):
        path.write_bytes(path.read_bytes() + b"written by QEMU")
    await ended(made, live(number, pushed=True, at_ns=7, **more))
    return state


async def held(made: Made, number: int = 10) -> HeldBackup:
    (found,) = (await made.held(BackupsAsk(do="get", id=uid(number)))).items
    return found


async def why_full(made: Made, number: int) -> str:
    manifest = (await held(made, number)).manifest
    assert manifest is not None
    return manifest.full_because


async def refused(asking: Awaitable[object]) -> str:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value.reason


@pytest.fixture
def vm() -> Any:
    return record(empty(SIZE), empty(SIZE, "more"), uid=VM)


async def test_a_vm_that_is_off_is_copied_and_the_copy_describes_itself(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        sizes = [{"name": "data"}, {"name": "more"}]
        state = await ended(made, work(disks=sizes))
        assert "it is the first backup of the VM" in state.message
        found = (await held(made)).manifest
        assert found is not None
        assert (found.name, found.uid, found.bitmap, found.parent) == ("web", VM, "", "")
        assert [one.name for one in found.disks] == ["data", "more"]
        assert all(one.digest and one.virtual_size_bytes == SIZE for one in found.disks)
        folder = store(node) / uid(10)
        names = ["backup.json", "data.qcow2", "more.qcow2"]
        assert sorted(path.name for path in folder.iterdir()) == names
        assert (await verified(made)).state == "done"
        assert (await held(made)).check is not None
        assert await ended(made, work(disks=sizes)) == state


async def test_an_increment_needs_the_bitmap_and_the_layers_of_its_parent(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    bitmap = bitmap_name(uid(10))
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        assert await why_full(made, 10) == "it is the first backup of the VM"
        assert (await pushed(made, node, 11, bitmaps=(bitmap,))).parent == bitmap
        assert await why_full(made, 11) == ""
        assert (await held(made, 10)).children == (uid(11),)
        for number, more, why in (
            (12, {}, "ended without a stop"),
            (13, {"mode": "full"}, "it was requested"),
            (14, {"chain": 1}, "the chain has 1 backups"),
            (15, {"disks": DISKS[:1]}, "only one of both backups has the disk more"),
        ):
            known = () if number == 12 else (bitmap,)
            await pushed(made, node, number, bitmaps=known, **more)
            assert why in await why_full(made, number)
        asked = live(16, bitmaps=(), mode="incremental")
        assert await refused(made.do(asked)) == "no_parent"
        assert not list(store(node).glob(".part*"))


async def test_a_copy_of_the_earlier_files_ends_before_new_ones_are_staged(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await made.do(live(bitmaps=()))
        async with made.jobs.slots, made.jobs.slots:
            assert (await made.do(live(pushed=True, at_ns=7))).state == "working"
            state = await made.do(live(bitmaps=()))  # another agent
            assert (state.state, state.step) == ("working", "push")
            assert made.jobs.ids == frozenset()
        state = await ended(made, live(pushed=True, at_ns=8))
        manifest = (await held(made)).manifest
        assert manifest is not None
        assert manifest.created_ns == 8
        assert await made.do(live(bitmaps=())) == state


async def test_a_late_or_repeated_request_replaces_no_file_that_qemu_writes(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    """The former request waited in a thread, or the bus delivered it twice."""
    first, second = uid(71), uid(72)
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        state = await made.do(live(bitmaps=(), attempt=second))
        for path in staged(node, 10):
            path.write_bytes(path.read_bytes() + b"written by QEMU")
        assert await made.do(live(bitmaps=(), attempt=second)) == state
        assert all(b"written by QEMU" in path.read_bytes() for path in staged(node, 10))
        await made.do(live(bitmaps=(), attempt=first))
        assert (
            await refused(ended(made, live(pushed=True, at_ns=7, attempt=second))) == "backup_lost"
        )
        assert (await made.held(BackupsAsk(do="get", id=uid(10)))).items == ()
        await pushed(made, node, 11, attempt=uid(73))
        manifest = (await held(made, 11)).manifest
        assert manifest is not None
        assert manifest.attempt == ""


async def test_a_late_request_of_an_earlier_attempt_harms_no_file_of_the_present_one(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    first, second = uid(71), uid(72)
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        for attempt in (first, second):
            await made.do(live(bitmaps=(), attempt=attempt))
        late = live(pushed=True, at_ns=7, attempt=first)
        assert await refused(ended(made, late)) == "backup_lost"
        assert len(staged(node, 10)) == 2
        assert (await ended(made, live(pushed=True, at_ns=8, attempt=second))).state == "done"


async def test_files_that_are_staged_again_while_they_are_stored_are_refused(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await made.do(live(bitmaps=(), attempt=uid(71)))
        files = BackupFiles(node.files.root, store(node))
        draft, storing = files.draft(uid(10)), made._store_disk
        assert draft is not None
        other = draft.model_copy(update={"attempt": uid(72)})

        async def replaced(*asked: Any) -> Any:
            files.begin(other)
            return await storing(*asked)

        made._store_disk = replaced  # type: ignore[assignment,method-assign]
        want = live(pushed=True, at_ns=7, attempt=uid(71))
        assert await refused(ended(made, want)) == "backup_lost"
        assert files.draft(uid(10)) == other
        assert len(staged(node, 10)) == 2


async def test_a_later_backup_has_a_greater_number_if_the_clock_was_set_back(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        numbers = []
        for number, at_ns in ((11, 9), (12, 7), (10, 8)):
            await made.do(live(number, bitmaps=()))
            await ended(made, live(number, pushed=True, at_ns=at_ns))
            manifest = (await held(made, number)).manifest
            assert manifest is not None
            numbers.append(manifest.number)
        assert numbers == [1, 2, 3]


async def test_a_backup_with_an_increment_is_not_deleted(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await made.do(live(11, bitmaps=(bitmap_name(uid(10)),)))  # it is being made
        gone = BackupsAsk(do="delete", id=uid(10))
        assert await refused(made.held(gone)) == "backup_needed"
        assert (await made.do(live(11, do="cancel"))).state == "none"
        assert not staged(node, 11)
        await made.held(gone)
        assert not list(store(node).iterdir())
        assert (await made.held(gone)).items == ()


@pytest.mark.parametrize("begun", [True, False])
async def test_an_increment_that_is_published_during_a_delete_keeps_its_parent(
    make_node: NodeMaker,
    threads: DiskThreads,
    vm: Any,
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await pushed(made, node, 11, bitmaps=(bitmap_name(uid(10)),))
        hidden = (store(node) / uid(11)).rename(store(node) / "elsewhere")
        part = store(node) / f".part-{uid(11)}"
        moves = [(part, store(node) / uid(11))]
        if begun:
            hidden.rename(part)
        else:
            moves.insert(0, (hidden, part))
        listed = openat2.names

        def names(directory: int) -> list[str]:
            found = listed(directory)
            if moves:  # another process publishes it
                source, target = moves.pop(0)
                source.rename(target)
            return found

        monkeypatch.setattr(openat2, "names", names)
        gone = BackupsAsk(do="delete", id=uid(10))
        files = BackupFiles(node.files.root, store(node))
        with pytest.raises(VirtbusError, match="rest on"):
            files.remove(uid(10))
        assert await refused(made.held(gone)) == "backup_needed"
        assert (await verified(made, 11)).state == "done"


async def test_a_backup_stays_while_one_that_may_rest_on_it_cannot_be_read(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await pushed(made, node, 11, bitmaps=(bitmap_name(uid(10)),))
        gone = BackupsAsk(do="delete", id=uid(10))
        manifest = store(node) / uid(11) / "backup.json"
        newer = json.loads(manifest.read_bytes()) | {"depth": "of a later schema"}
        manifest.write_text(json.dumps(newer))
        assert (await held(made, 11)).manifest is None
        assert (await held(made, 10)).children == (uid(11),)
        assert await refused(made.held(gone)) == "backup_needed"
        manifest.unlink()
        manifest.symlink_to("backup.json")  # an error of each read
        assert await refused(made.held(gone)) == "store_error"
        assert (await held(made, 11)).manifest is None
        await made.held(BackupsAsk(do="delete", id=uid(11)))
        await made.held(gone)
        assert not list(store(node).iterdir())


@pytest.mark.parametrize("file", ["data.qcow2", "backup.json"])
async def test_damage_is_found_before_a_restore(
    make_node: NodeMaker, threads: DiskThreads, vm: Any, file: str
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await pushed(made, node, 11, bitmaps=(bitmap_name(uid(10)),))
        path = store(node) / uid(10) / file
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert await refused(verified(made, 11)) == "backup_damaged"
        assert (await held(made, 11)).check is not None


async def test_a_backup_is_verified_again_if_the_last_result_cannot_be_read(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        (store(node) / uid(10) / "verified.json").write_bytes(b"{")
        assert (await held(made)).check is None
        assert (await verified(made)).state == "done"
        assert (await held(made)).check is not None


async def test_a_parent_that_is_gone_is_found(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await pushed(made, node, 11, bitmaps=(bitmap_name(uid(10)),))
        (store(node) / uid(10)).rename(store(node) / "elsewhere")
        assert await refused(verified(made, 11)) == "backup_damaged"
        assert await refused(verified(made, 12)) == "backup_not_here"


async def test_a_crash_at_any_write_leaves_no_backup_or_a_complete_one(
    make_node: NodeMaker, threads: DiskThreads, crashes: Crashes, vm: Any
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm)
        point, more = 0, True
        while more:
            async with backing_up(node, threads) as made:
                crashes.left = point
                more = False
                try:
                    await pushed(made, node, 10)
                except (CrashError, VirtbusError):
                    more = True
                finally:
                    crashes.left = None
            whole = {path.name for path in store(node).iterdir() if not path.name.startswith(".")}
            async with backing_up(node, threads) as made:
                if whole:
                    assert (await verified(made)).state == "done"
                else:
                    await pushed(made, node, 10)
                assert (await verified(made)).state == "done"
                await made.held(BackupsAsk(do="delete", id=uid(10)))
                files = BackupFiles(node.files.root, store(node))
                expire(files.staging, files, 0.0, ())
                assert not list(store(node).iterdir())
                assert not staged(node, 10)
            point += 1
        assert point > 10


async def test_files_of_readings_expire_without_a_backup_directory(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, backing_up(node, threads, off=True) as made:
        old, new = (node.files.root / "backups" / uid(number) for number in (11, 12))
        for folder in (old, new):
            folder.mkdir(parents=True)
        os.utime(old, (1, 1))
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            expiry = group.create_task(made.expire_forever())
            while old.exists():
                await asyncio.sleep(0.01)
            expiry.cancel()
        assert new.exists()


async def test_remains_of_other_attempts_expire_and_work_stays(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await made.do(live(10, bitmaps=()))
        files = BackupFiles(node.files.root, store(node))
        assert expire(files.staging, files, 3600.0, ()) == []
        assert expire(files.staging, files, -1.0, {uid(10)}) == []
        assert sorted(expire(files.staging, files, -1.0, ())) == sorted(
            [f".part-{uid(10)}", uid(10)]
        )
        assert await refused(made.do(live(10))) == "backup_lost"


async def test_a_node_without_a_directory_or_space_makes_no_backup(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node:
        await node.disks.ensure(vm)
        async with backing_up(node, threads, off=True) as made:
            assert await refused(made.do(work())) == "backups_off"
            assert not (await made.held(BackupsAsk())).enabled
        full = SpaceLimits(1 << 60, 0.0)
        async with backing_up(node, threads, space=full) as made:
            assert await refused(ended(made, work(disks=[{"name": "data"}]))) == "disk_full"
            assert await refused(made.do(live(bitmaps=()))) == "disk_full"
            store(node).rename(store(node).with_name("unmounted"))
            assert await refused(made.do(live(bitmaps=()))) == "backup_dir_missing"


async def test_a_file_that_qemu_did_not_write_is_refused(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await made.do(live(bitmaps=()))
        staged(node, 10)[0].write_bytes(b"something else")
        assert await refused(ended(made, live(pushed=True, at_ns=7))) == "disk_damaged"
        assert not list(store(node).iterdir())


async def test_a_file_that_grows_while_it_is_stored_is_refused(
    make_node: NodeMaker, threads: DiskThreads, vm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await made.do(live(bitmaps=()))
        (grown, _), step = staged(node, 10), Digester.step

        def grow(read: Digester) -> int:
            with grown.open("ab") as file:
                file.write(b"more")
            return step(read)

        monkeypatch.setattr(Digester, "step", grow)
        assert await refused(ended(made, live(pushed=True, at_ns=7))) == "disk_damaged"
        assert not list(store(node).iterdir())


async def test_a_backup_outlives_its_vm(
    make_node: NodeMaker, threads: DiskThreads, vm: Any
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await node.disks.ensure(vm)
        await pushed(made, node, 10)
        await node.disks.release(VM, 1, None)
        assert (await verified(made)).state == "done"
