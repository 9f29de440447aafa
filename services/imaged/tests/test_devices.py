"""Volumes on devices: content first and the mark last, also if imaged dies at any write."""

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from services.imaged.tests.filling import ended, filling, work
from services.imaged.tests.records import named, record, ref, uid
from services.imaged.tests.site_under_test import FAST, MIB, NodeMaker, Web

from virtbus.bus.runtime.pool_settings import BlockPool, LocalPool
from virtbus.imaged.core.device_marks import END_BYTES, DeviceMark, sealed, unsealed
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_jobs import Job
from virtbus.imaged.edge.device_io import Device, extents_of
from virtbus.imaged.edge.devices import Devices
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.volume_ref import VolumeRef

SIZE = 8 * MIB
OLD = b"left by another" * 100


def raw(name: str = "data-1", size_bytes: int = 4 * MIB) -> VolumeRef:
    update = {"pool": "raw", "kind": PoolKind.BLOCK, "copied": True}
    return ref(size_bytes, name=name).model_copy(update=update)


class CrashError(Exception):
    """The process dies here."""


@dataclass
class Disk:
    """A file in place of a device; it dies at a write or a sync of the given number."""

    path: Path
    dies_at: int = 0
    done: int = field(default=0, init=False)

    def __call__(self, pool: str, volume: str) -> int:
        assert (pool, volume.partition(".")[0]) == ("raw", "default")
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def step(self) -> None:
        self.done += 1
        if self.done == self.dies_at:
            raise CrashError


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    path = tmp_path / "device"
    path.write_bytes(bytes(SIZE + END_BYTES))
    made = Disk(path)
    write, sync = Device.write, Device.sync

    def half(self: Device, at: int, data: bytes) -> None:
        try:
            made.step()
        except CrashError:
            write(self, at, data[: len(data) // 2])
            raise
        write(self, at, data)

    def late(self: Device) -> None:
        made.step()
        sync(self)

    monkeypatch.setattr(Device, "write", half)
    monkeypatch.setattr(Device, "sync", late)
    return made


def source(tmp_path: Path) -> int:
    """A sparse raw file with data at both ends of 4 MiB."""
    descriptor = os.open(tmp_path / "raw", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(descriptor, 4 * MIB)
    os.pwrite(descriptor, b"root" * 1024, 0)
    os.pwrite(descriptor, b"tail" * 1024, 3 * MIB)
    return descriptor


def fill(of: Devices, content: int, name: str = "data-1") -> None:
    volume = raw(name)
    room_bytes = of.begin(volume, 4 * MIB)
    for at in range(0, room_bytes, 4 * MIB):
        of.zero(volume, at, min(4 * MIB, room_bytes - at))
    of.finish(volume, content, 4 * MIB)


def release(of: Devices) -> None:
    room_bytes = of.begin_release(raw()) or 0
    for at in range(0, room_bytes, 4 * MIB):
        of.zero(raw(), at, min(4 * MIB, room_bytes - at))
    if room_bytes:
        of.end_release(raw())


def complete(path: Path) -> bool:
    data = path.read_bytes()
    return data[:4096] == b"root" * 1024 and data[3 * MIB : 3 * MIB + 4096] == b"tail" * 1024


def test_a_device_is_complete_if_it_has_the_mark_after_a_crash_at_any_write(
    tmp_path: Path, disk: Disk
) -> None:
    content = source(tmp_path)
    for dies_at in range(1, 40):
        disk.path.write_bytes(bytes(SIZE + END_BYTES))
        disk.dies_at, disk.done = dies_at, 0
        of = Devices(disk)
        with contextlib.suppress(CrashError):
            fill(of, content)
        whole, disk.dies_at = disk.done < dies_at, 0
        marked = of.filled_bytes(raw()) is not None
        assert not marked or complete(disk.path), f"marked too early at write {dies_at}"
        assert marked or not whole
        if dies_at > 1:  # the claim is whole: no other volume gets the device
            with pytest.raises(VirtbusError) as taken:
                of.begin(raw("data-2"), 4 * MIB)
            assert taken.value.reason == "device_taken"
        _repeat(of, content, disk)
        if whole:
            return
    pytest.fail("the fill has more writes than expected")


def _repeat(of: Devices, content: int, disk: Disk) -> None:
    """A repeat completes the device."""
    fill(of, content)
    assert of.filled_bytes(raw()) == 4 * MIB
    assert complete(disk.path)


def test_a_release_leaves_nothing_after_a_crash_at_any_write(tmp_path: Path, disk: Disk) -> None:
    content = source(tmp_path)
    for dies_at in range(1, 40):
        disk.path.write_bytes(bytes(SIZE + END_BYTES))
        disk.dies_at, disk.done = 0, 0
        of = Devices(disk)
        fill(of, content)
        disk.dies_at, disk.done = dies_at, 0
        with contextlib.suppress(CrashError):
            release(of)
        whole, disk.dies_at = disk.done < dies_at, 0
        assert of.filled_bytes(raw()) is None or dies_at == 1
        release(of)
        assert not any(disk.path.read_bytes()[:SIZE])
        if whole:
            assert not any(disk.path.read_bytes())
            return
    pytest.fail("the release has more writes than expected")


def test_a_device_with_foreign_data_is_never_written(tmp_path: Path, disk: Disk) -> None:
    disk.path.write_bytes(OLD.ljust(SIZE + END_BYTES, b"\0"))
    with pytest.raises(VirtbusError, match="not empty") as refused:
        fill(Devices(disk), source(tmp_path))
    assert refused.value.reason == "device_not_blank"
    assert disk.path.read_bytes().startswith(OLD)
    disk.path.write_bytes(bytes(SIZE + END_BYTES))
    with pytest.raises(VirtbusError) as refused:
        Devices(disk).begin(raw(size_bytes=SIZE + 1), SIZE + 1)
    assert refused.value.reason == "disk_too_large"


def test_a_device_that_returns_other_bytes_is_not_marked(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "digest_of", lambda *_: "0" * 64)
    of = Devices(disk)
    with pytest.raises(VirtbusError, match="other bytes"):
        fill(of, source(tmp_path))
    assert of.filled_bytes(raw()) is None


def test_a_torn_mark_is_no_mark() -> None:
    mark = DeviceMark(kind="filled", ref=raw(), digest="a" * 64, size_bytes=MIB)
    block = sealed(mark)
    assert (len(block), unsealed(block)) == (4096, mark)
    for cut in range(0, 600, 7):
        assert unsealed(block[:cut] + bytes(4096 - cut)) in {None, mark}
    assert unsealed(bytes(4096)) is None
    assert unsealed(b"\xff" * 4096) is None


async def test_a_volume_is_filled_used_and_cleared_by_the_requests_of_its_node(
    make_node: NodeMaker, server: Web, threads: DiskThreads, disk: Disk
) -> None:
    server.files["a"] = b"root" * 1024 + bytes(MIB)
    async with make_node(open_device=disk) as node:
        with pytest.raises(VirtbusError) as waits:
            await node.disks.ensure(record(named(), uid=uid(1), refs={"data": raw()}))
        assert waits.value.reason == "volume_not_filled"
        async with filling(node, threads, pools=node.disks.pools) as fills:
            want = work(raw(), image=server.url("a"))
            state = await ended(fills, want)
            assert (state.state, state.virtual_size_bytes) == ("done", 4 * MIB)
            assert (await fills.do(want)).state == "done"
        assert disk.path.read_bytes()[:4096] == b"root" * 1024
        made = await node.disks.ensure(record(named(), uid=uid(1), refs={"data": raw()}))
        assert made.ready.disks["data"].virtual_size_bytes == 4 * MIB
        assert await node.disks.release_volume(raw())
        assert not any(disk.path.read_bytes())
        assert not await node.disks.release_volume(raw())


@pytest.mark.integration
async def test_a_volume_moves_from_a_device_to_a_file_and_back(
    make_node: NodeMaker, threads: DiskThreads, disk: Disk, tmp_path: Path
) -> None:
    async with make_node(open_device=disk) as node:
        fill(Devices(disk), source(tmp_path))
        here = ref(4 * MIB).model_copy(update={"copied": True})
        async with filling(node, threads, pools=node.disks.pools) as fills:
            state = await ended(fills, work(here, volume=raw(), moved=True))
            assert (state.state, state.virtual_size_bytes) == ("done", 4 * MIB)
            file = node.state / "disks" / "volumes" / here.folder / "disk.qcow2"
            compare = ["qemu-img", "compare", "-f", "raw", "-F", "qcow2"]
            files = [str(tmp_path / "raw"), str(file)]
            subprocess.run([*compare, *files], check=True, capture_output=True)
            back = work(raw(), volume=here, moved=True)
            with pytest.raises(VirtbusError) as refused:
                await ended(fills, back)  # the device has the content of an earlier time
            assert refused.value.reason == "volume_exists"
            before = disk.path.read_bytes()
            assert not await node.disks.release_volume(raw(), made_by=back.id)
            assert disk.path.read_bytes() == before
            assert await node.disks.release_volume(raw())
            assert (await ended(fills, back)).virtual_size_bytes == 4 * MIB
            assert complete(disk.path)
            with pytest.raises(VirtbusError) as refused:
                await ended(fills, back.model_copy(update={"id": uid(91)}))
            assert refused.value.reason == "volume_exists"
            assert not await node.disks.release_volume(raw(), made_by=uid(91))
            assert await node.disks.release_volume(raw(), made_by=back.id)


async def test_a_device_without_its_content_is_not_read(
    make_node: NodeMaker, threads: DiskThreads, disk: Disk
) -> None:
    async with make_node(open_device=disk) as node:
        here = ref(4 * MIB).model_copy(update={"copied": True})
        async with filling(node, threads, pools=node.disks.pools) as fills:
            with pytest.raises(VirtbusError) as refused:
                await ended(fills, work(here, volume=raw(), moved=True))
            assert refused.value.reason == "volume_empty"


async def test_an_empty_volume_is_zeroes_and_a_long_release_is_repeated(
    make_node: NodeMaker, threads: DiskThreads, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.imaged.device_volumes.RELEASE_S", -1.0)
    monkeypatch.setattr("virtbus.imaged.device_volumes.ZERO_BYTES", SIZE // 2)
    async with make_node(open_device=disk) as node:
        await node.disks.devices.fill(raw(), 4 * MIB, None, FAST, Job())
        with pytest.raises(VirtbusError) as again:
            await node.disks.release_volume(raw())
        assert again.value.reason == "volume_wiping"
        monkeypatch.setattr("virtbus.imaged.device_volumes.RELEASE_S", 5.0)
        assert await node.disks.release_volume(raw())


async def test_a_device_stays_as_it_is_while_a_vm_has_it_by_the_agents_word(
    make_node: NodeMaker, threads: DiskThreads, disk: Disk
) -> None:
    def refuse(pool: str, folder: str) -> None:
        assert (pool, folder) == ("raw", raw().folder)
        raise OSError(0, "the VM web of this node has it")

    async with make_node(open_device=disk) as node:
        devices = node.disks.pools.devices
        await node.disks.devices.fill(raw(), 4 * MIB, None, FAST, Job())
        before, free = disk.path.read_bytes(), devices.refuse_used
        devices.refuse_used = refuse
        with pytest.raises(VirtbusError, match="the VM web of this node has it") as refused:
            await node.disks.release_volume(raw())
        assert (refused.value.code, refused.value.reason) == (409, "volume_in_use")
        assert disk.path.read_bytes() == before
        devices.refuse_used = free
        assert await node.disks.release_volume(raw())


async def test_the_volumes_on_devices_are_listed_by_their_marks(
    make_node: NodeMaker, threads: DiskThreads, disk: Disk
) -> None:
    gone = "default.gone"
    volumes = {raw().key: "/dev/disk/by-id/a", gone: "/dev/disk/by-id/b"}
    block = BlockPool.model_validate({"kind": "block", "volumes": volumes})

    def opened(pool: str, volume: str) -> int:
        if volume == gone:
            raise OSError(0, "No such file")
        return disk(pool, volume)

    async with make_node(
        pool_settings={"local": LocalPool(kind=PoolKind.LOCAL), "raw": block}, open_device=opened
    ) as node:
        assert (await node.disks.held_volumes("")).volumes == ()
        Devices(disk).begin(raw(), 4 * MIB)
        (half,) = (await node.disks.held_volumes("")).volumes
        assert (half.folder, half.ref) == (raw().folder, None)
        await node.disks.devices.fill(raw(), 4 * MIB, None, FAST, Job())
        (whole,) = (await node.disks.held_volumes(raw().folder[:-1])).volumes
        assert whole.ref is not None
        assert (whole.ref.folder, whole.ref.pool, whole.ref.kind) == (raw().folder, "raw", "block")
        assert (whole.ref.size_bytes, whole.ref.copied) == (4 * MIB, True)
        assert (await node.disks.held_volumes(raw().folder)).volumes == ()
        assert await node.disks.release_volume(raw())
        assert (await node.disks.held_volumes("")).volumes == ()


async def test_a_wipe_begins_at_the_first_byte_of_each_device_and_after_each_fill(
    tmp_path: Path, threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that moves between pools has a device in each of them."""
    monkeypatch.setattr("virtbus.imaged.device_volumes.ZERO_BYTES", SIZE // 4)
    files = {pool: tmp_path / pool for pool in ("raw", "fast")}
    for file in files.values():
        file.write_bytes(bytes(SIZE + END_BYTES))
    of = Devices(lambda pool, _: os.open(files[pool], os.O_RDWR | os.O_CLOEXEC))
    volumes = DeviceVolumes(of, threads, tmp_path)
    refs = {pool: raw().model_copy(update={"pool": pool}) for pool in files}

    async def filled(pool: str) -> None:
        await volumes.fill(refs[pool], 4 * MIB, None, FAST, Job())
        with files[pool].open("r+b") as file:
            file.write(OLD)

    for pool in files:
        await filled(pool)
    zero = of.zero

    def interrupted(volume: VolumeRef, at: int, count: int) -> None:
        if at:
            raise CrashError
        zero(volume, at, count)

    with monkeypatch.context() as half:
        half.setattr(of, "zero", interrupted)
        with pytest.raises(CrashError):
            await volumes.release(refs["raw"])
    assert await volumes.release(refs["fast"])
    assert not any(files["fast"].read_bytes())
    await filled("raw")
    assert await volumes.release(refs["raw"])
    assert not any(files["raw"].read_bytes())


@pytest.mark.integration
def test_a_real_device_is_cleared_by_its_driver(tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_bytes(bytes(SIZE + END_BYTES))
    asked = ["losetup", "--find", "--show", str(file)]
    loop = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    try:
        of = Devices(lambda _pool, _volume: os.open(loop, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
        fill(of, source(tmp_path))
        assert of.filled_bytes(raw()) == 4 * MIB
        assert complete(Path(loop))
        release(of)
        assert not any(Path(loop).read_bytes())
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    assert extents_of(source(tmp_path))
