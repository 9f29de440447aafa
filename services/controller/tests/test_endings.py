"""The end of a delete, once its node has released the VM."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.virtual import settle

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.finalizer import Finalizer
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.informers import Informers
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode


class _NeverPurges(MemoryBus):
    """A bus on which the purge of one key is not answered."""

    def __init__(self, server: MemoryServer, key: str) -> None:
        super().__init__(server)
        self._key = key

    async def purge(self, key: str, **how: Any) -> int:
        if key == self._key:
            await asyncio.get_running_loop().create_future()
        return await super().purge(key, **how)


async def _deleting(bus: MemoryBus, fleet: Fleet, one: VmRecord) -> None:
    """A VM that is being deleted, and whose node has released everything."""
    commits = Commits(bus)
    held = (await commits.create(one, None)).held
    going = held.record.model_copy(update={"deleting": True})
    held = await commits.replace(held, going)
    fleet.apply(StoredVm(going, held.revision))
    said = status(going, VmState.DELETING, released=True)
    fleet.put_status(subjects.vm_status(said.node, said.uid), encode(said), held.revision)


async def test_a_delete_does_not_wait_for_the_end_of_another() -> None:
    slow, quick = record(1, "slow"), record(2, "quick")
    bus = _NeverPurges(MemoryServer(), subjects.vm_record("n1", uid(1)))
    fleet, released = Fleet(), asyncio.Queue[str]()
    for one in (slow, quick):
        await _deleting(bus, fleet, one)
        released.put_nowait(one.uid)
    claim = subjects.name_claim("default", "quick")
    async with asyncio.timeout(5), bus.watch("$KV.vm.>") as watch, background() as tasks:
        tasks.start(Finalizer(bus, fleet, FleetEvents(bus)).finish_released(released))
        async for item in watch:
            if isinstance(item, Entry) and (item.key, item.kind) == (claim, EntryKind.PURGE):
                break
    left = await bus.get(subjects.vm_record("n1", uid(1)))
    assert left is not None
    assert left.kind is EntryKind.PUT


async def test_a_node_that_releases_a_vm_before_the_delete_is_acknowledged_ends_it() -> None:
    bus, fleet = MemoryBus(MemoryServer()), Fleet()
    feeds = Informers(bus, fleet, WatchServer(fleet, bus, "c"))
    key, one = subjects.vm_record("n1", uid(1)), record(1)
    held = (await Commits(bus).create(one, None)).held
    async with background() as tasks:
        tasks.start(feeds.run())
        tasks.start(Finalizer(bus, fleet, FleetEvents(bus)).finish_released(feeds.released))
        await settle()
        going = held.record.model_copy(update={"deleting": True})
        # without a pause: the watch delivers the record after both
        revision = await bus.put(key, encode(going), expect=held.revision)
        said = status(going, VmState.DELETING, released=True)
        fleet.put_status(subjects.vm_status(said.node, said.uid), encode(said), revision)
        fleet.apply(StoredVm(going, revision))
        await settle()
    left = await bus.get(key)
    assert left is None or left.kind is EntryKind.PURGE


async def test_a_delete_that_meets_an_unreadable_value_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("virtbus.controller.edge.finalizer.MENDED_S", 0.01)
    original, refused = Commits.finish, [VirtbusError(Code.CONFLICT, "unreadable", "a sum")]

    async def finish(commits: Commits, held: StoredVm, **more: Any) -> int:
        if refused:
            raise refused.pop()
        return await original(commits, held, **more)

    monkeypatch.setattr(Commits, "finish", finish)
    bus, fleet, released = MemoryBus(MemoryServer()), Fleet(), asyncio.Queue[str]()
    await _deleting(bus, fleet, record(1))
    released.put_nowait(uid(1))
    claim = subjects.name_claim("default", "web")
    async with asyncio.timeout(5), bus.watch("$KV.vm.>") as watch, background() as tasks:
        tasks.start(Finalizer(bus, fleet, FleetEvents(bus)).finish_released(released))
        async for item in watch:
            if isinstance(item, Entry) and (item.key, item.kind) == (claim, EntryKind.PURGE):
                break


async def test_a_delete_that_fails_many_times_has_one_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("virtbus.controller.edge.finalizer.MENDED_S", 0.05)
    tried = asyncio.Queue[str]()

    async def finish(_: Commits, held: StoredVm) -> int:
        tried.put_nowait(held.record.uid)
        raise VirtbusError(Code.CONFLICT, "unreadable", "a sum")

    monkeypatch.setattr(Commits, "finish", finish)
    bus, fleet, released = MemoryBus(MemoryServer()), Fleet(), asyncio.Queue[str]()
    await _deleting(bus, fleet, record(1))
    for _ in range(5):  # each status of the VM queues it
        released.put_nowait(uid(1))
    async with asyncio.timeout(5), background() as tasks:
        tasks.start(Finalizer(bus, fleet, FleetEvents(bus)).finish_released(released))
        for _ in range(5 + 3):
            await tried.get()
        assert tried.empty(), "each later attempt is alone"


async def _left_behind(bus: MemoryBus, *, heard: bool, fenced: bool, deleted: bool) -> bool:
    """Return True if a sweep removes a status without a record."""
    fleet, one = Fleet(), record(1)
    key = subjects.vm_record("n1", uid(1))
    if deleted:
        await bus.put(key, encode(one))
        await bus.purge(key)
    there = await bus.put(subjects.vm_status("n1", uid(1)), encode(status(one)))
    fleet.put_status(subjects.vm_status("n1", uid(1)), encode(status(one)), there)
    now_s = asyncio.get_running_loop().time()
    fleet.quiet_since_s = now_s if heard else now_s - 3600
    if heard:
        fleet.put_node(subjects.node_record("n1"), encode(node()), now_s, 0)
    if fenced:
        proof = Fence(by="operator", why="off", time_ns=1)
        fleet.node_spec(NodeSpec(node="n1", fenced=proof), 1)
    endings = Finalizer(bus, fleet, FleetEvents(bus))
    assert await endings.sweep(grace_s=60) == 0
    removed = await endings.sweep(grace_s=0)
    entry = await bus.get(subjects.vm_status("n1", uid(1)))
    assert entry is not None
    assert removed == (entry.kind is EntryKind.PURGE)
    return bool(removed)


@pytest.mark.parametrize(
    ("heard", "fenced", "deleted", "goes"),
    [
        (True, False, True, True),
        (False, False, True, False),
        (True, True, True, False),
        (True, False, False, False),
    ],
    ids=["left behind", "node silent", "node fenced", "record lost by the bus"],
)
async def test_a_status_stored_after_its_purge_is_removed(
    *, heard: bool, fenced: bool, deleted: bool, goes: bool
) -> None:
    bus = MemoryBus(MemoryServer())
    assert await _left_behind(bus, heard=heard, fenced=fenced, deleted=deleted) is goes
