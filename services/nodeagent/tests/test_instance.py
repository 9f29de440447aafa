"""One node id, one host: with any copies of the credentials, only one agent at a time acts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry
from virtbus.bus.errors import OutcomeUnknownError
from virtbus.nodeagent import instance as module
from virtbus.nodeagent.core.instance import Me
from virtbus.nodeagent.instance import Ownership
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.hosts import HostMarks, HostRecord, Instance, Takeover
from virtbus.schemas.node import NodeRecord, NodeState
from virtbus.schemas.wire import encode, read

NODE = "n1"
LIVES = count(1)


class Disk:
    """A state folder, with the host's other identifiers; a copy of it is a clone."""

    def __init__(self, key: str = "k1", machine: str = "m1", boot: str = "b1") -> None:
        self.marks = HostMarks(key=key, machine=machine, hardware="h1")
        self.boot, self.folder = boot, f"8:{next(LIVES)}"
        self.lives: set[str] = set()
        self.word = ("", "")

    def clone(self, **changed: str) -> "Disk":
        """The same disk on other hardware, or in another folder."""
        other = Disk(boot=changed.pop("boot", "b2"))
        other.marks = self.marks.model_copy(update=changed)
        other.lives = set(self.lives)
        return other

    def remember(self, instance: str) -> None:
        self.lives.add(instance)

    def disown(self) -> None:
        self.lives.clear()

    def tell(self, instance: str, why: str) -> None:
        self.word = (instance, why)

    def life(
        self, bus: MemoryBus, on_replaced: Callable[[], Awaitable[None]] | None = None
    ) -> Ownership:
        me = Me(f"life-{next(LIVES)}", self.marks, self.boot, self.folder, frozenset(self.lives))
        return Ownership(bus, NODE, me, self, "host", on_replaced)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.01), ("REFUSED_LOOK_S", 0.02), ("QUIET_S", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(module, "WAIT_REPORTED_S", 0.05)


async def claimed(disk: Disk, server: MemoryServer) -> Ownership:
    own = disk.life(MemoryBus(server))
    async with asyncio.timeout(5):
        await own.claim()
    return own


@asynccontextmanager
async def refused(disk: Disk, server: MemoryServer, **more: object) -> AsyncIterator[Ownership]:
    """An instance that asks for the node and is refused; it keeps asking."""
    own = disk.life(MemoryBus(server), **more)  # type: ignore[arg-type]  # a callback
    async with asyncio.TaskGroup() as group:
        task = group.create_task(own.claim())
        async with asyncio.timeout(5):
            while not disk.word[1]:
                await asyncio.sleep(0.01)
        assert not own.held
        yield own
        task.cancel()


async def joined(server: MemoryServer, disk: Disk, **more: object) -> None:
    """The controllers know the node's host."""
    record = HostRecord(node=NODE, host=disk.marks, **more)
    await MemoryBus(server).put(subjects.node_host(NODE), encode(record))


def damage(server: MemoryServer, value: bytes) -> None:
    """Put bytes at the key that no program of ours would write."""
    key = subjects.node_instance(NODE)
    server.shelf(key).apply(key, value)


async def beat(server: MemoryServer, own: Ownership, state: NodeState = NodeState.READY) -> None:
    record = NodeRecord(
        node=NODE, hostname="", instance=own.me.instance, state=state, cpus=1, memory_bytes=1
    )
    await MemoryBus(server).put(subjects.node_record(NODE), encode(record))


async def test_the_successor_of_a_killed_agent_takes_over_at_once(server: MemoryServer) -> None:
    disk = Disk()
    first = await claimed(disk, server)
    await beat(server, first)
    await joined(server, disk)
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    second = await claimed(disk, server)
    assert loop.time() - before_s < 0.1
    assert second.held
    with pytest.raises(VirtbusError, match="run by an agent"):
        await first.prove()


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(lambda _: Disk(key="other"), id="credentials were copied"),
        pytest.param(lambda d: d.clone(hardware="h2"), id="the disk was cloned"),
        pytest.param(lambda d: d.clone(machine="m2"), id="the state folder was copied"),
        pytest.param(lambda d: d.clone(boot="b1"), id="the folder was copied on this host"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["joined", "not joined yet"])
@pytest.mark.parametrize("alive", [True, False], ids=["heard", "silent"])
async def test_a_second_host_is_refused_even_if_the_first_is_silent(
    server: MemoryServer, stranger: Callable[[Disk], Disk], *, known: bool, alive: bool
) -> None:
    disk = Disk()
    first = await claimed(disk, server)
    if known:
        await joined(server, disk)
    if alive:
        await beat(server, first)
    other = stranger(disk)
    async with refused(other, server):
        await asyncio.sleep(0.3)
        assert "takeover" in other.word[1]
        bus = MemoryBus(server)
        rival = await bus.get(subjects.node_rival(NODE))
        assert rival is not None
        assert read(Instance, rival.value).why in other.word[1]
        await first.prove()


async def test_an_old_disk_on_the_same_hardware_is_refused(server: MemoryServer) -> None:
    disk = Disk()
    yesterday = disk.clone()
    await claimed(disk, server)
    async with refused(yesterday, server):
        pass


async def test_a_booted_host_waits_for_the_end_of_its_last_heartbeat(server: MemoryServer) -> None:
    disk = Disk()
    first = await claimed(disk, server)
    await beat(server, first)
    disk.boot = "b2"
    own = disk.life(bus := MemoryBus(server))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(own.claim())
        await asyncio.sleep(0.2)
        assert not own.held
        await bus.purge(subjects.node_record(NODE))
        async with asyncio.timeout(2):
            await task
    assert own.held


async def test_a_cleanly_stopped_host_boots_without_a_wait(server: MemoryServer) -> None:
    disk = Disk()
    first = await claimed(disk, server)
    await beat(server, first, NodeState.LEFT)
    disk.boot = "b2"
    assert (await claimed(disk, server)).held


async def test_a_person_gives_the_node_to_the_host_that_waits(server: MemoryServer) -> None:
    disk, other = Disk(), Disk(key="other")
    first = await claimed(disk, server)
    await joined(server, disk)
    bus = MemoryBus(server)
    async with refused(other, server) as second:
        key = await bus.get(subjects.node_instance(NODE))
        assert key is not None
        word = Takeover(instance=second.me.instance, over=key.revision, why="burnt", time_ns=1)
        await joined(server, other, takeover=word)
        async with asyncio.timeout(5):
            while not second.held:
                await asyncio.sleep(0.01)
    with pytest.raises(VirtbusError, match="run by an agent"):
        await first.prove()
    async with refused(disk, server):
        pass  # also after its next start
    assert (await claimed(other, server)).held  # and the new host's agent may be restarted


async def test_a_takeover_is_void_once_the_holder_is_back(server: MemoryServer) -> None:
    disk, other = Disk(), Disk(key="other")
    first = await claimed(disk, server)
    await joined(server, disk)
    bus = MemoryBus(server)
    async with refused(other, server) as second:
        key = await bus.get(subjects.node_instance(NODE))
        assert key is not None
        await first.prove()  # it was cut off, and is back before the other one takes the key
        word = Takeover(instance=second.me.instance, over=key.revision, why="burnt", time_ns=1)
        await joined(server, disk, takeover=word)
        await asyncio.sleep(0.2)
        assert not second.held
        await first.prove()


async def test_a_host_that_was_replaced_ends_its_guests(server: MemoryServer) -> None:
    disk, other = Disk(), Disk(key="other")
    await claimed(disk, server)
    ended = asyncio.Event()

    async def end() -> None:
        ended.set()

    async with refused(other, server, on_replaced=end):
        await asyncio.sleep(0.1)
        assert not ended.is_set()  # nobody has approved another host
    word = Takeover(instance="x", over=0, why="burnt", time_ns=1)
    await joined(server, other, takeover=word)
    disk.word = ("", "")
    async with refused(disk, server, on_replaced=end), asyncio.timeout(5):
        await ended.wait()


async def test_one_of_two_copies_with_the_same_memory_ends(
    server: MemoryServer,
) -> None:
    disk = Disk()
    first = await claimed(disk, server)
    twin = disk.clone(boot="b1")
    second = Ownership(MemoryBus(server), NODE, first.me, twin)
    second._revision, second.held = first._revision, True
    await first.prove()
    with pytest.raises(VirtbusError, match="run by an agent"):
        await second.prove()
    assert twin.lives == set()
    await first.prove()


async def test_the_key_is_taken_again_on_an_emptied_or_rolled_back_bus(
    server: MemoryServer,
) -> None:
    disk, bus = Disk(), MemoryBus(server)
    old = await claimed(disk, server)
    own = await claimed(disk, server)
    await bus.purge(subjects.node_instance(NODE))
    await own.prove()
    earlier = Instance(
        node=NODE, instance=old.me.instance, host=disk.marks, boot="b1", folder=disk.folder
    )
    await bus.put(subjects.node_instance(NODE), encode(earlier))
    await own.prove()
    assert own.held


async def test_after_a_restore_no_copy_takes_the_hosts_node(
    server: MemoryServer,
) -> None:
    disk = Disk()
    await joined(server, disk)  # from the backup; the key is not in it
    async with refused(disk.clone(hardware="h2"), server):
        assert (await claimed(disk, server)).held


async def test_hosts_that_ask_at_once_have_one_winner(server: MemoryServer) -> None:
    disks = [Disk(key=f"k{number}") for number in range(5)]
    lives = [disk.life(MemoryBus(server)) for disk in disks]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(life.claim()) for life in lives]
        await asyncio.sleep(0.3)
        assert sum(life.held for life in lives) == 1
        for task in tasks:
            task.cancel()


async def test_an_unreadable_key_has_an_unknown_holder(
    server: MemoryServer,
) -> None:
    disk = Disk()
    await claimed(disk, server)
    damage(server, b"\xc1")
    async with refused(disk, server):
        pass


DAMAGES = {
    "garbage": b"\xc1",
    "empty": b"",
    "over-size": b"x" * 32 * 1024,
    "wrong types": encode({"node": 7, "instance": []}),
    "newer": encode({"schema_version": 99, "node": NODE}),
    "of another node": encode(Instance(node="n2", instance="life", host=HostMarks(key="k2"))),
}


@pytest.mark.parametrize("damaged", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("known", [True, False], ids=["joined", "not joined yet"])
async def test_the_holder_of_a_node_rewrites_a_damaged_key(
    server: MemoryServer, damaged: bytes, *, known: bool
) -> None:
    disk, bus = Disk(), MemoryBus(server)
    own = await claimed(disk, server)
    if known:
        await joined(server, disk)
    damage(server, damaged)
    async with refused(disk.clone(boot="b1"), server):
        await own.prove()
    assert own.held
    key = await bus.get(subjects.node_instance(NODE))
    assert key is not None
    assert read(Instance, key.value).instance == own.me.instance
    assert (await claimed(disk, server)).held  # and its successor takes over as usual


def corrupted(value: bytes, part: str) -> bytes:
    """Return the value with a changed byte in the middle of a part."""
    at = value.index(part.encode()) + len(part) // 2
    return value[:at] + bytes([value[at] ^ 0x5A]) + value[at + 1 :]


class LossyBus(MemoryBus):
    """Its next write of the instance key arrives with a changed byte, and its answer is lost."""

    corrupt: Callable[[Instance], str] | None = None

    async def put(self, key: str, value: bytes, **more: Any) -> int:
        if self.corrupt is None or key != subjects.node_instance(NODE):
            return await super().put(key, value, **more)
        part, self.corrupt = self.corrupt(read(Instance, value)), None
        await super().put(key, corrupted(value, part), **more)
        raise OutcomeUnknownError(key)


PARTS: dict[str, Callable[[Instance], str]] = {
    "token": lambda own: own.token,
    "instance": lambda own: own.instance,
    "host": lambda own: own.host.machine,
    "folder": lambda own: own.folder,
    "field name": lambda _: "instance",
    "mark of the copy": lambda _: "copy",
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("claiming", [True, False], ids=["claim", "renewal"])
@pytest.mark.parametrize("killed", [True, False], ids=["then killed", "goes on"])
async def test_a_corrupt_byte_in_its_own_write_never_costs_a_host_its_node(
    server: MemoryServer, part: Callable[[Instance], str], *, claiming: bool, killed: bool
) -> None:
    disk, bus = Disk(), LossyBus(server)
    await joined(server, disk)
    own = disk.life(bus)
    if claiming:
        bus.corrupt = part
    async with asyncio.timeout(5):
        await own.claim()
        if not claiming:
            bus.corrupt = part
            with pytest.raises(OutcomeUnknownError):
                await own.prove()
        if not killed:
            await own.prove()
            assert own.held
    assert (await claimed(disk, server)).held  # its successor takes over as usual


async def test_a_corrupt_answer_to_a_read_never_costs_an_agent_its_node(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, bus = Disk(), MemoryBus(server)
    own = disk.life(bus)
    await own.claim()
    key = subjects.node_instance(NODE)
    intact = bus.get
    answers = count(1)

    async def get(subject: str) -> Entry | None:
        entry = await intact(subject)
        if entry is None or subject != key or next(answers) > 1:
            return entry
        corrupt = {"token": "corrupt", "second_copy": b""}
        return entry._replace(value=encode(read(Instance, entry.value).model_copy(update=corrupt)))

    before = own._revision
    await own.prove()
    own._revision = before  # the answer to that write was lost
    monkeypatch.setattr(bus, "get", get)
    await own.prove()
    assert own.held
    assert next(answers) > 2


async def test_a_damaged_key_may_belong_to_a_host_after_a_takeover(
    server: MemoryServer,
) -> None:
    for other in (Disk(key="other"), Disk()):  # the same host with another disk, too
        await MemoryBus(server).purge(subjects.node_host(NODE))
        await MemoryBus(server).purge(subjects.node_instance(NODE))
        disk = Disk()
        own = await claimed(disk, server)
        word = Takeover(instance="another", over=own._revision, why="burnt", time_ns=1)
        await joined(server, other, takeover=word)
        damage(server, b"\xc1")
        with pytest.raises(VirtbusError, match="run by an agent"):
            await own.prove()


def test_missing_identifiers_of_a_machine_are_not_compared() -> None:
    known, untold = HostMarks(key="k", machine="m", hardware="h"), HostMarks(key="k")
    assert known.same(untold)
    assert untold.same(known)
    assert not known.same(HostMarks(key="k", machine="m", hardware="other"))
    assert not known.same(HostMarks(key="other", machine="m", hardware="h"))
