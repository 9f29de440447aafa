"""Pools of a node: folders of their own, limits, states, and volumes that stay in them."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
from services.imaged.tests import test_exports as exports
from services.imaged.tests.filling import Copies, ended, filling, work
from services.imaged.tests.records import empty, named, record, ref, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image

from virtbus.bus.runtime.pool_settings import LocalPool, PoolSettings, check_pools, load_pools
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.edge.volume_files import VolumeFolders
from virtbus.imaged.pool_probes import PoolProbes
from virtbus.imaged.snapshot_parts import SnapshotParts
from virtbus.imaged.snapshots import Snapshots
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ANY_EPOCH, WorkState
from virtbus.schemas.pool import PoolKind, PoolReport, PoolState
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.volume_ref import VolumeRef

A = uid(1)


def local(**more: Any) -> LocalPool:
    return LocalPool(kind=PoolKind.LOCAL, **more)


FAST: dict[str, PoolSettings] = {"local": local(), "fast": local(mount=False, overcommit=0)}


def in_fast(size_bytes: int, name: str = "data-1", copied: bool = False) -> VolumeRef:
    return ref(size_bytes, name=name).model_copy(update={"pool": "fast", "copied": copied})


def home(node: Node) -> Path:
    root = node.state / "disks" / "pools" / "fast"
    root.mkdir(parents=True, exist_ok=True)
    return root


async def ensure(node: Node, of: VolumeRef) -> None:
    await node.disks.ensure(record(named(), uid=A, refs={"data": of}))


@contextmanager
def mounted(root: Path, size_mib: int) -> Iterator[None]:
    """A small file system of its own."""
    root.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mib}m,mode=711"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "pool", str(root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(root)], check=True)


async def test_a_volume_is_made_grown_and_removed_in_its_pool(make_node: NodeMaker) -> None:
    async with make_node(pool_settings=FAST) as node:
        root = home(node)
        await ensure(node, in_fast(8 * MIB))
        disk = root / in_fast(0).folder / "disk.qcow2"
        assert disk.exists()
        assert not (node.state / "disks" / "volumes").exists()
        await ensure(node, in_fast(16 * MIB))
        assert node.disks.pools.measure("fast").allocated_bytes == 16 * MIB
        held = await node.disks.held_volumes("")
        assert [one.ref and one.ref.pool for one in held.volumes] == ["fast"]
        assert await node.disks.release_volume(in_fast(16 * MIB))
        assert list(root.iterdir()) == []
        assert root.exists()  # a mount point stays


async def test_a_pool_that_the_node_lacks_or_that_is_not_there_is_refused(
    make_node: NodeMaker,
) -> None:
    async with make_node(pool_settings=FAST) as node:
        other = in_fast(8 * MIB).model_copy(update={"pool": "slow"})
        with pytest.raises(VirtbusError, match="no pool slow") as unknown:
            await ensure(node, other)
        assert unknown.value.reason == "pool_unknown"
        for step in (ensure(node, in_fast(8 * MIB)), node.disks.release_volume(in_fast(8 * MIB))):
            with pytest.raises(VirtbusError, match="does not exist") as gone:
                await step
            assert gone.value.reason == "pool_gone"
        home(node)
        await ensure(node, in_fast(8 * MIB))  # the same request, once the folder is there


async def test_a_pool_that_is_not_mounted_is_gone_and_never_written(make_node: NodeMaker) -> None:
    async with make_node(pool_settings={**FAST, "fast": local()}) as node:
        root = home(node)
        with pytest.raises(VirtbusError, match="nothing is mounted"):
            await ensure(node, in_fast(8 * MIB))
        assert list(root.iterdir()) == []
        assert node.disks.pools.measure("fast").state is PoolState.GONE
        assert (await node.disks.held_volumes("")).unread_pools == ("fast",)


@pytest.mark.integration
async def test_a_mounted_pool_reports_its_size_and_is_refused_when_read_only(
    make_node: NodeMaker,
) -> None:
    settings: dict[str, PoolSettings] = {**FAST, "fast": local(reserve=0, overcommit=2.0)}
    async with make_node(pool_settings=settings) as node:
        root = node.state / "disks" / "pools" / "fast"
        with mounted(root, 64):
            await ensure(node, in_fast(32 * MIB))
            found = node.disks.pools.measure("fast")
            assert (found.state, found.volumes, found.size_bytes) == (PoolState.READY, 1, 64 * MIB)
            subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
            assert node.disks.pools.measure("fast").state is PoolState.READ_ONLY
        assert node.disks.pools.measure("fast").state is PoolState.GONE


@pytest.mark.integration
async def test_a_read_only_pool_is_still_counted_and_its_volumes_are_exported(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node(pool_settings=FAST) as node:
        pools, root, of = node.disks.pools, node.state / "disks" / "pools" / "fast", in_fast(MIB)
        shared = in_fast(MIB, "shared").model_copy(update={"shared": True})
        with mounted(root, 64):
            await ensure(node, of)
            await ensure(node, shared)
            subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
            pools.read_again("fast")
            found = pools.states["fast"] = pools.measure("fast")
            assert (found.state, found.volumes) == (PoolState.READ_ONLY, 2)
            assert found.allocated_bytes == 2 * MIB
            with pytest.raises(VirtbusError, match="ReadOnly"):
                await ensure(node, of)
            async with exports.exporting(node, threads, exports.Copies(), pools=pools) as made:
                want = exports.work(uid=of.uid, disk=None, ref=of)
                assert (await exports.ended(made, want)).state == "done"
            place = DiskPlaces(pools, node.store).of(A, "", of)  # as a copy and a backup begin
            assert place.bitmaps() == frozenset()


async def test_a_volume_that_cannot_be_read_does_not_end_the_measures_of_its_pool(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: VolumeFolders, folder: str) -> None:
        raise VirtbusError(Code.UNAVAILABLE, "store_error", f"{folder} cannot be read")

    async with make_node(pool_settings=FAST) as node:
        home(node)
        await ensure(node, in_fast(MIB).model_copy(update={"shared": True}))
        monkeypatch.setattr(VolumeFolders, "shared_bytes", unreadable)
        found = node.disks.pools.measure("fast")
        assert (found.state, found.volumes) == (PoolState.READY, 0)


@pytest.mark.integration
async def test_a_full_pool_takes_nothing_new_and_deletes_work_without_a_free_byte(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    settings: dict[str, PoolSettings] = {**FAST, "fast": local(reserve=8 * MIB, overcommit=0)}
    async with make_node(pool_settings=settings) as node:
        root = node.state / "disks" / "pools" / "fast"
        with mounted(root, 32):
            await ensure(node, in_fast(8 * MIB))
            disk = root / in_fast(0).folder / "disk.qcow2"
            with disk.open("ab") as file, contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), b"x" * 4096)
            assert node.disks.pools.measure("fast").free_bytes == 0
            full = node.disks.pools.measure("fast")
            assert (full.state, "reserve" in full.message) == (PoolState.FULL, True)
            for refused in (in_fast(16 * MIB), in_fast(8 * MIB, "data-2")):
                with pytest.raises(VirtbusError) as error:  # growth and a create
                    await ensure(node, refused)
                assert error.value.reason == "disk_full"
            async with filling(node, threads, pools=node.disks.pools) as fills:
                third = work(in_fast(8 * MIB, "data-3", copied=True), volume=in_fast(8 * MIB))
                with pytest.raises(VirtbusError) as error:
                    await ended(fills, third)
                assert error.value.reason == "disk_full"
            await ensure(node, in_fast(8 * MIB))  # a VM with data there still starts
            assert await node.disks.release_volume(in_fast(8 * MIB))
            assert node.disks.pools.measure("fast").state is PoolState.READY


def fill_up(root: Path) -> None:
    """Take each free byte of a file system."""
    with (root / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(root).f_bavail == 0


@pytest.mark.integration
async def test_cancels_purges_and_discards_work_without_a_free_byte(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path
) -> None:
    root, copies, exported = tmp_path / "full", Copies(), exports.Copies()
    of = ref(8 * MIB, name="data-2").model_copy(update={"copied": True})
    copies.may.clear()
    exported.may.clear()
    with mounted(root, 32):
        async with (
            make_node(state=root) as node,
            filling(node, threads, copies) as fills,
            exports.exporting(node, threads, exported) as made,
        ):
            for number in (1, 2):
                await node.disks.ensure(record(empty(8 * MIB), uid=uid(number)))
            with node.files.path(uid(2), "data").open("ab") as disk:
                disk.write(b"the guest's own")
            await node.disks.release(uid(2), 1, QuarantineRequest(why="no record"))
            await node.disks.ensure(record(empty(8 * MIB), uid=uid(2), epoch=2))
            want = work(of, volume=ref(8 * MIB))
            await ensure(node, ref(8 * MIB))
            assert {(await fills.do(want)).state, (await made.do(exports.work())).state} == {
                "working"
            }
            while not copies.begun or not exported.begun:
                await asyncio.sleep(0.01)
            fill_up(root)
            assert (await fills.do(want.model_copy(update={"do": "cancel"}))).state == "none"
            fill_up(root)
            assert (await made.do(exports.work("cancel"))).state == "none"
            fill_up(root)
            await node.disks.purge(uid(2))
            fill_up(root)
            assert (await node.disks.release(uid(2), ANY_EPOCH)).found  # --discard-local-disks
            assert await node.disks.quarantined() == []
            left = {path.name for path in (root / "disks").rglob("*") if path.is_file()}
            assert left == {"data.qcow2", "disk.qcow2", "record.json"}


@pytest.mark.integration
async def test_a_snapshot_of_a_volume_in_another_file_system_is_a_copy(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node(pool_settings=FAST) as node:
        root, of = node.state / "disks" / "pools" / "fast", in_fast(8 * MIB)
        parts = SnapshotParts(
            node.disks.locks,
            DiskPlaces(node.disks.pools, node.store),
            SnapshotFolders(node.files.root),
            DiskSpace(node.files.root, SpaceLimits(0, 0.0)),
            threads,
        )
        want = SnapshotWork(
            id=uid(7),
            uid=A,
            name="web",
            snapshot=SnapshotRef(uid=uid(7), namespace="x", name="s"),
            disks=(SnapshotDisk(name="data", ref=of),),
        )
        with mounted(root, 64):
            await ensure(node, of)
            disk = root / of.folder / "disk.qcow2"
            write = ["qemu-io", "-f", "qcow2", "-c", "write -P 7 1M 3M", str(disk)]
            subprocess.run(write, check=True, capture_output=True)
            async with asyncio.TaskGroup() as group:
                made = Snapshots(DiskJobs(group), parts)
                with pytest.raises(VirtbusError) as refused:
                    await taken(made, want.model_copy(update={"layered": True}))
                assert refused.value.reason == "no_snapshots"
                assert not list(root.glob("**/*layer*"))
                await taken(made, want)
            copy = node.state / "disks" / "snapshots" / want.snapshot.folder / "data.qcow2"
            assert copy.read_bytes() == disk.read_bytes()


async def taken(made: Snapshots, want: SnapshotWork) -> WorkState:
    while (state := await made.do(want)).state == "working":
        await asyncio.sleep(0.01)
    return state


async def test_the_sum_of_sizes_keeps_within_the_overcommit_limit(make_node: NodeMaker) -> None:
    async with make_node(pool_settings=FAST) as node:
        home(node)
        size_bytes = node.disks.pools.measure("fast").size_bytes
        half = local(mount=False, overcommit=64 * MIB / size_bytes, reserve=0)
        node.disks.pools = Pools(node.files, {**FAST, "fast": half})
        await ensure(node, in_fast(32 * MIB))
        with pytest.raises(VirtbusError, match="overcommit"):
            await ensure(node, in_fast(48 * MIB, "data-2"))
        with pytest.raises(VirtbusError, match="overcommit"):
            await ensure(node, in_fast(96 * MIB))
        await ensure(node, in_fast(63 * MIB))
        assert node.disks.pools.measure("fast").allocated_bytes == 63 * MIB


async def test_an_image_is_copied_into_a_pool_and_not_needed_afterwards(
    make_node: NodeMaker, server: Web, threads: DiskThreads
) -> None:
    server.files["a"] = qcow2_image(payload=0)
    async with make_node(pool_settings=FAST) as node:
        root = home(node)
        of = in_fast(64 * MIB, copied=True)
        async with filling(node, threads, pools=node.disks.pools) as fills:
            done = await ended(fills, work(of, image=server.url("a")))
        assert (done.state, done.virtual_size_bytes) == ("done", 64 * MIB)
        assert (root / of.folder / "disk.qcow2").exists()
        await ensure(node, of)
        node.store.remove_links(node.store.named(server.url("a"))[1])
        assert len(await node.disks.collect_garbage(0.0)) == 1


async def test_a_pool_that_hangs_becomes_slow_then_gone_and_delays_no_other(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.imaged.pool_probes.SLOW_S", 0.02)
    monkeypatch.setattr("virtbus.imaged.pool_probes.GONE_S", 1.0)  # longer than the loop's delays
    async with make_node(pool_settings=FAST) as node:
        home(node)
        pools, answers = Hanging(node, FAST), asyncio.Event()
        seen: list[PoolState] = []

        def changed() -> None:
            states = {one.name: one.state for one in probes.reports}
            seen.append(states.get("fast", PoolState.READY))
            if states == {"local": PoolState.READY, "fast": PoolState.READY} and len(seen) > 3:
                answers.set()

        probes = PoolProbes(pools, changed, interval_s=0.01)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(probes.run())
            async with asyncio.timeout(20):
                while PoolState.GONE not in seen:
                    await asyncio.sleep(0.01)
                assert {one.name: one.state for one in probes.reports}["local"] is PoolState.READY
                (hanging,) = [one for one in enumerate_threads() if one.name == "pool-fast"]
                assert hanging.daemon, "otherwise Python would wait for it at the exit of imaged"
                with pytest.raises(VirtbusError, match="does not answer"):
                    pools.of(in_fast(MIB))
                assert pools.page("").unread_pools == ("fast",)
                pools.hangs = False
                await answers.wait()
                pools.of(in_fast(MIB))
            running.cancel()
        assert seen.index(PoolState.SLOW) < seen.index(PoolState.GONE)


class Hanging(Pools):
    """Pools whose `fast` does not answer."""

    def __init__(self, node: Node, settings: dict[str, PoolSettings]) -> None:
        super().__init__(node.files, settings, SpaceLimits(0, 0.0))
        self.hangs = True

    def measure(self, name: str) -> PoolReport:
        while self.hangs and name == "fast":
            time.sleep(0.005)
        return super().measure(name)


async def test_a_volume_is_copied_to_another_pool_and_its_former_data_goes(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node(pool_settings=FAST) as node:
        root, of, to = home(node), ref(8 * MIB), in_fast(8 * MIB, copied=True)
        await ensure(node, of)
        pools = node.disks.pools
        async with filling(node, threads, Copies(), pools=pools) as fills:
            want = work(to, volume=of, moved=True)
            state = await ended(fills, want)
            assert state.virtual_size_bytes == 8 * MIB
            assert await node.disks.release_volume(of)
            assert (await ended(fills, want)) == state
        assert [path.name for path in (root / to.folder).glob("disk*")] == ["disk.qcow2"]
        assert not (node.state / "disks" / "volumes").exists()
        await ensure(node, to)
        held = await node.disks.held_volumes("")
        assert [one.ref and one.ref.pool for one in held.volumes] == ["fast"]


async def test_a_volume_on_a_server_needs_no_file_and_a_release_removes_nothing(
    make_node: NodeMaker,
) -> None:
    async with make_node() as node:
        of = ref(8 * MIB).model_copy(update={"pool": "san", "kind": PoolKind.NBD})
        made = await node.disks.ensure(record(named(), uid=A, refs={"data": of}))
        assert made.ready.disks["data"].virtual_size_bytes == 8 * MIB
        assert not await node.disks.release_volume(of)
        assert await node.disks.held() == {}


def test_the_file_of_pools_is_read_with_all_problems(tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    assert list(load_pools(file)) == ["local"]
    plain = '[pools.local]\nkind = "local"\novercommit = 3'
    file.write_text(f'[pools.fast]\nkind = "local"\nreserve = "2GiB"\n{plain}')
    found = load_pools(file)
    expected = local(reserve=2 * 1024 * MIB)
    assert (found["fast"], found["local"]) == (expected, local(overcommit=3.0))
    file.write_text('[pools.fast]\nkind = "tape"\novercommit = -1\n[pools."no name"]\n')
    with pytest.raises(ValueError, match=r"pools\.fast.*tape.*pools\.no name"):
        check_pools(file)
    same = '[pools.san]\nkind = "nbd"\nhost = "h"\nvolumes = {"a.b" = "x", "a.c" = "x"}\n'
    file.write_text(same)
    with pytest.raises(ValueError, match="two volumes have the place 'x'"):
        check_pools(file)
    file.write_text("pools = 3 = 4")
    with pytest.raises(ValueError, match=r"pools\.toml"):
        check_pools(file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('kind = "iscsi"\nhost = "h"\nuser = "u"', "both `user` and `secret_file`"),
        ('kind = "iscsi"\nhost = "h"\nvolumes = { "a.b" = "disk" }', r"volumes\.a\.b"),
        ('kind = "rbd"\nmonitors = []', "monitors"),
        ('kind = "rbd"\nmonitors = ["h"]\nvolumes = { "a.b" = "x" }', r"volumes\.a\.b"),
        ('kind = "nfs"\nhost = "h"\nvolumes = { "a.b" = "/x/../y" }', "that names one file"),
        ('kind = "block"\nvolumes = { "a.b" = "/dev/vg/../y" }', "that names one file"),
        ('kind = "block"\nvolumes = { "a.b" = "/dev/vg/./y" }', "that names one file"),
        ('kind = "block"\nvolumes = { "a.b" = "/dev/vg//y" }', "that names one file"),
        ('kind = "block"\nvolumes = { "a.b" = "/dev/vg/y/" }', "that names one file"),
        ('kind = "block"\nvolumes = { "a.b" = "/dev/sda1" }', "another disk after a boot"),
        ('kind = "lvm"\ngroup = ".."', "that names one file"),
        ('kind = "nfs"\nhost = "h"\nport = 1', "port"),
        ('kind = "nfs"\nhost = "h"\nuser = 107', "both `user` and `group`"),
    ],
)
def test_a_pool_is_refused_with_the_wrong_setting(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    file.write_text(f"[pools.san]\n{text}\n")
    with pytest.raises(ValueError, match=why):
        check_pools(file)


def test_each_kind_of_server_has_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    login = 'user = "u"\nsecret_file = "/etc/virtbus/san.secret"\n'
    file.write_text(
        f'[pools.a]\nkind = "iscsi"\nhost = "192.0.2.5"\n{login}'
        'volumes = { "x.y" = "iqn.2026-01.org.example:one/1" }\n'
        f'[pools.b]\nkind = "rbd"\nmonitors = ["192.0.2.5", "2001:db8::5"]\n{login}'
        'volumes = { "x.y" = "vms/one" }\n'
        '[pools.c]\nkind = "nfs"\nhost = "192.0.2.5"\nvolumes = { "x.y" = "/export/y.raw" }\n'
    )
    found = load_pools(file)
    kinds = {name: str(one.kind) for name, one in found.items()}
    assert kinds == {"local": "local", "a": "iscsi", "b": "rbd", "c": "nfs"}
