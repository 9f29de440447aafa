"""Volumes on LVM: content first and the tag last, also if imaged dies at any request."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from services.imaged.tests.filling import ended, filling, work
from services.imaged.tests.records import named, record, ref, uid
from services.imaged.tests.site_under_test import FAST, MIB, NodeMaker, Web
from services.nodeagent.tests.lvm2 import Lvm2, lvm2
from services.nodeagent.tests.lvm_program import OLD, THIN

from virtbus.bus.runtime.device_socket import LogicalAnswer, LogicalRequest, ask_logical
from virtbus.bus.runtime.pool_settings import LocalPool
from virtbus.bus.runtime.tasks import background
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_jobs import Job
from virtbus.imaged.edge.devices import Devices
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.logical_volumes import LogicalVolumes
from virtbus.imaged.edge.pools import no_device
from virtbus.nodeagent.edge.device_door import DeviceDoor
from virtbus.nodeagent.edge.lvm_commands import LvmCommands
from virtbus.nodeagent.edge.volume_groups import VolumeGroup
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.volume_ref import VolumeRef

pytestmark = pytest.mark.integration

SIZE = 8 * MIB


def logical(size_bytes: int = SIZE, name: str = "data-1") -> VolumeRef:
    update = {"pool": "fast", "kind": PoolKind.LVM, "copied": True}
    return ref(size_bytes, name=name).model_copy(update=update)


class CrashError(Exception):
    """The process dies here."""


@dataclass
class Agent:
    """The agent's door. imaged dies before the request of a number, or after it."""

    path: Path
    vg: Lvm2
    dies_at: int = 0
    done: int = 0

    def __call__(self, request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
        self.done += 1
        if self.done * 2 - 1 == self.dies_at:
            raise CrashError
        answer, device = ask_logical(self.path, request)
        if self.done * 2 == self.dies_at:
            if device is not None:
                os.close(device)
            raise CrashError
        return answer, device

    def device(self) -> Path:
        """Return the only device of a volume."""
        (found,) = (Path(self.vg.devices) / self.vg.group).glob("virtbus-*")
        return found


@pytest.fixture
def vg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Lvm2]:
    """A volume group; with the parameter THIN, one with a thin pool."""
    thin_bytes = 16 * MIB if getattr(request, "param", "") == THIN else 0
    with lvm2(tmp_path / "lvm", thin_bytes=thin_bytes) as made:
        monkeypatch.setenv("PATH", f"{made.home}/bin:{os.environ['PATH']}")
        yield made


@pytest.fixture
async def agent(tmp_path: Path, vg: Lvm2) -> AsyncIterator[Agent]:
    path, disks = tmp_path / "devices.sock", tmp_path / "disks"
    disks.mkdir()
    thin = (vg.home / "thin").exists()
    pool = vg.pool(thin_pool=THIN) if thin else vg.pool()
    group = VolumeGroup("fast", pool, LvmCommands(), vg.devices)
    async with background() as tasks:
        tasks.start(DeviceDoor(path, disks, {}, groups={"fast": group}).serve())
        while not path.exists():
            await asyncio.sleep(0.01)
        yield Agent(path, vg)


@pytest.fixture
def content(tmp_path: Path) -> Iterator[int]:
    """A sparse raw file with data at its start and in its last MiB."""
    descriptor = os.open(tmp_path / "raw", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 4 * MIB)
    os.pwrite(descriptor, b"root" * 1024, 0)
    os.pwrite(descriptor, b"tail" * 1024, 3 * MIB)
    yield descriptor
    os.close(descriptor)


def fill(of: Devices, content: int) -> None:
    old_bytes = of.begin(logical(), SIZE)
    of.zero(logical(), 0, old_bytes)
    of.finish(logical(), content, SIZE, "fill-1")


def release(of: Devices) -> None:
    old_bytes = of.begin_release(logical())
    if old_bytes is not None:
        of.zero(logical(), 0, old_bytes)
        of.end_release(logical())


def complete(data: bytes) -> bool:
    """Return True if a device has the content, and zeroes in the rest."""
    rest = data[4096 : 3 * MIB] + data[3 * MIB + 4096 :]
    ends = data[:4096] == b"root" * 1024, data[3 * MIB : 3 * MIB + 4096] == b"tail" * 1024
    return all(ends) and not any(rest)


async def test_a_volume_is_filled_used_grown_listed_and_removed_by_the_requests_of_its_node(
    make_node: NodeMaker, server: Web, threads: DiskThreads, agent: Agent
) -> None:
    server.files["a"] = b"root" * 1024 + bytes(MIB)
    of, pools = logical(), {"fast": agent.vg.pool(), "local": LocalPool(kind=PoolKind.LOCAL)}
    async with make_node(pool_settings=pools, ask_logical=agent) as node:
        with pytest.raises(VirtbusError) as waits:
            await node.disks.ensure(record(named(), uid=uid(1), refs={"data": of}))
        assert waits.value.reason == "volume_not_filled"
        async with filling(node, threads, pools=node.disks.pools) as fills:
            want = work(of, image=server.url("a"))
            state = await ended(fills, want)
            assert (state.state, state.virtual_size_bytes) == ("done", SIZE)
            done = len(agent.vg.commands())
            assert (await ended(fills, want)).state == "done"
            assert len(agent.vg.commands()) == done, "a repeat changes nothing"
        data = agent.device().read_bytes()
        assert data[:4096] == b"root" * 1024
        assert not any(data[4096:]), "nothing is left of an earlier owner"
        made = await node.disks.ensure(record(named(), uid=uid(1), refs={"data": of}))
        assert made.ready.disks["data"].virtual_size_bytes == SIZE
        larger = record(named(), uid=uid(1), refs={"data": logical(2 * SIZE)})
        made = await node.disks.ensure(larger)
        assert made.ready.disks["data"].virtual_size_bytes == 2 * SIZE
        assert agent.device().read_bytes() == data + bytes(SIZE)
        (held,) = (await node.disks.held_volumes("")).volumes
        assert held.ref == logical(2 * SIZE)
        assert (await node.disks.held_volumes(of.folder)).volumes == ()
        agent.vg.fails("lvs", "  Volume group not found\n")
        assert (await node.disks.held_volumes("")).volumes == (), "other pools are still listed"
        agent.vg.works()
        assert await node.disks.release_volume(of)
        assert agent.vg.tags() == {}
        assert not await node.disks.release_volume(of)


async def test_a_volume_is_complete_if_it_has_the_tag_after_a_crash_at_any_request(
    agent: Agent, content: int, threads: DiskThreads
) -> None:
    of = Devices(no_device, LogicalVolumes(agent))
    for dies_at in range(1, 40):
        agent.dies_at, agent.done = dies_at, 0
        with contextlib.suppress(CrashError):
            await threads.run(fill, of, content)
        whole, agent.dies_at = agent.done * 2 < dies_at, 0
        marked = await threads.run(of.filled_bytes, logical())
        assert marked in {None, SIZE}
        assert marked is None or complete(agent.device().read_bytes())
        if marked is None:
            await threads.run(fill, of, content)
        assert complete(agent.device().read_bytes())
        await threads.run(release, of)
        assert agent.vg.tags() == {}
        if whole:
            return
    pytest.fail("the fill has more requests than expected")


async def test_a_release_and_a_growth_end_after_a_crash_at_any_request(
    agent: Agent, content: int, threads: DiskThreads
) -> None:
    of = Devices(no_device, LogicalVolumes(agent))
    done = {"grown": False, "released": False}
    for dies_at in range(1, 40):
        await threads.run(fill, of, content)
        for step, work_ in (("grown", of.grown_bytes), ("released", None)):
            agent.dies_at, agent.done = dies_at, 0
            with contextlib.suppress(CrashError):
                if work_ is not None:
                    await threads.run(work_, logical(2 * SIZE))
                else:
                    await threads.run(release, of)
            done[step] |= agent.done * 2 < dies_at
            agent.dies_at = 0
            seen = await threads.run(of.filled_bytes, logical())
            if work_ is not None:
                assert seen in {SIZE, 2 * SIZE}
                assert complete(agent.device().read_bytes()[:seen]), "the guest sees old data"
                assert await threads.run(work_, logical(2 * SIZE)) == 2 * SIZE
        await threads.run(release, of)
        assert agent.vg.tags() == {}
        if all(done.values()):
            return
    pytest.fail("a step has more requests than expected")


async def test_a_long_growth_is_repeated_and_shows_only_what_is_zero(
    agent: Agent, content: int, threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Devices(no_device, LogicalVolumes(agent))
    await threads.run(fill, of, content)
    monkeypatch.setattr("virtbus.imaged.edge.devices.ZERO_BYTES", 4 * MIB)
    monkeypatch.setattr("virtbus.imaged.edge.devices.GROW_S", 0.0)
    with pytest.raises(VirtbusError) as again:
        await threads.run(of.grown_bytes, logical(2 * SIZE))
    assert again.value.reason == "volume_growing"
    assert await threads.run(of.filled_bytes, logical()) == SIZE
    assert OLD in agent.device().read_bytes()[SIZE:]
    monkeypatch.setattr("virtbus.imaged.edge.devices.GROW_S", 5.0)
    assert await threads.run(of.grown_bytes, logical(2 * SIZE)) == 2 * SIZE


@pytest.mark.parametrize("vg", [THIN], indirect=True)
async def test_a_thin_volume_is_not_written_where_it_is_empty(
    agent: Agent, content: int, threads: DiskThreads, tmp_path: Path
) -> None:
    of = Devices(no_device, LogicalVolumes(agent))
    on_devices = DeviceVolumes(of, threads, tmp_path)
    await on_devices.fill(logical(), SIZE, None, FAST, Job(), "fill-1")
    assert await threads.run(of.grown_bytes, logical(2 * SIZE)) == 2 * SIZE
    assert agent.device().read_bytes() == OLD * (2 * SIZE // len(OLD)), "as the thin pool gave it"
    assert await on_devices.release(logical())
    assert set(agent.vg.tags()) == {THIN}


async def test_a_volume_moves_from_a_volume_group_to_a_file_and_back(
    make_node: NodeMaker, threads: DiskThreads, agent: Agent, content: int, tmp_path: Path
) -> None:
    async with make_node(ask_logical=agent) as node:
        await threads.run(fill, node.disks.pools.devices, content)
        here = ref(SIZE).model_copy(update={"copied": True})
        async with filling(node, threads, pools=node.disks.pools) as fills:
            state = await ended(fills, work(here, volume=logical(), moved=True))
            assert (state.state, state.virtual_size_bytes) == ("done", SIZE)
            file = node.state / "disks" / "volumes" / here.folder / "disk.qcow2"
            compare = ["qemu-img", "compare", "-f", "raw", "-F", "qcow2"]
            files = [str(tmp_path / "raw"), str(file)]
            subprocess.run([*compare, *files], check=True, capture_output=True)
            back = work(logical(), volume=here, moved=True)
            with pytest.raises(VirtbusError, match="remove its logical volume") as refused:
                await ended(fills, back)  # it has the content of an earlier time
            assert refused.value.reason == "volume_exists"
            assert not await node.disks.release_volume(logical(), made_by=back.id)
            assert await node.disks.release_volume(logical())
            assert (await ended(fills, back)).virtual_size_bytes == SIZE
            assert complete(agent.device().read_bytes())
            assert await node.disks.release_volume(logical(), made_by=back.id)


async def test_a_group_without_room_and_an_agent_that_is_away_are_told_apart(
    agent: Agent, threads: DiskThreads
) -> None:
    of = Devices(no_device, LogicalVolumes(agent))
    with pytest.raises(VirtbusError, match="may promise") as full:
        await threads.run(of.begin, logical(900 * MIB), 900 * MIB)
    assert full.value.reason == "disk_full"
    agent.path.unlink()
    with pytest.raises(VirtbusError) as away:
        await threads.run(of.filled, logical())
    assert away.value.reason == "pool_gone"


async def test_requests_that_wait_for_the_agent_keep_few_threads(
    threads: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.imaged.edge.logical_volumes.WAIT_S", 0.05)
    begun, may = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hangs(_request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may.wait(), loop).result()
        return LogicalAnswer(), None

    of = Devices(no_device, LogicalVolumes(hangs))
    async with asyncio.TaskGroup() as waiting:
        for _ in range(2):
            waiting.create_task(threads.run(of.filled, logical()))
        await begun.wait()
        await asyncio.sleep(0.05)
        with pytest.raises(VirtbusError, match="busy with other logical volumes"):
            await threads.run(of.filled, logical())
        may.set()
