"""Fake hosts with a nodeagent's behaviour: they start, end and release VMs, and lose power.

One place records all running VMs, so a VM that runs twice is noticed at once (I1).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.controller.tests.fleets import node, status
from services.controller.tests.virtual import World

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.runtime.tasks import background
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import HOST_KEY, HOSTS_KEY, JOIN_KEY, NODE_SPEC_KEY, PEER_KEY
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, read

BEAT_S = 4.0


@dataclass
class Guests:
    """The running VMs of each host, and the violations."""

    running: dict[str, str] = field(default_factory=dict)
    started: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def start(self, uid: str, host: str) -> None:
        there = self.running.setdefault(uid, host)
        if there != host:
            self.wrong.append(f"{uid} runs on {there} and on {host}")
        self.started.append((uid, host))

    def end(self, uid: str, host: str) -> None:
        if self.running.get(uid) == host:
            del self.running[uid]


class Host:
    """One node; its `disks` (uid to epoch) survive a power cut."""

    def __init__(self, made: World, guests: Guests, name: str, memory_bytes: int) -> None:
        self.name = name
        self.disks: dict[str, int] = {}
        self.stuck = False
        """Guests do not end: nothing is released."""
        self.first_beat_s = 0.0
        """Event after which its heartbeat is received when it powers on."""
        self._bus = MemoryBus(made.server, name)
        self._guests = guests
        self._memory_bytes = memory_bytes
        self._lives = 0
        self._fenced = False

    @asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """Power: guests end at once when the context does."""
        self._lives += 1
        try:
            async with background() as tasks:
                tasks.start(self._beat())
                tasks.start(self._follow())
                yield
        finally:
            for uid, host in list(self._guests.running.items()):
                if host == self.name:
                    self._guests.end(uid, self.name)

    async def _beat(self) -> None:
        instance = f"{self.name}-{self._lives}"
        await asyncio.sleep(self.first_beat_s)
        while True:
            record = node(self.name, instance=instance, memory_bytes=self._memory_bytes)
            await self._bus.put(subjects.node_record(self.name), encode(record))
            await asyncio.sleep(BEAT_S)

    async def _follow(self) -> None:
        listed: dict[str, Entry] | None = {}
        async with self._bus.node_watch(self.name, "agent") as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    first, listed = listed or {}, None
                    for entry in sorted(first.values(), key=lambda e: not _is_wish(e)):
                        await self._take(entry)
                elif isinstance(item, Entry) and listed is not None:
                    listed[item.key] = item
                elif isinstance(item, Entry):
                    await self._take(item)

    async def _take(self, entry: Entry) -> None:
        uid = entry.key.rsplit(".", maxsplit=1)[-1]
        if _is_wish(entry):
            there = entry.kind is EntryKind.PUT
            self._fenced = there and read(NodeSpec, entry.value).fenced is not None
        elif uid in {JOIN_KEY, HOST_KEY, HOSTS_KEY, PEER_KEY} or "._op." in entry.key:
            return
        elif entry.kind is EntryKind.PURGE:
            self._forget(uid)
            await self._bus.purge(subjects.vm_status(self.name, uid))
        else:
            await self.look(read(VmRecord, entry.value))

    async def look(self, record: VmRecord) -> None:
        """Execute a record."""
        uid = record.uid
        if record.ending:
            if not self.stuck:
                self._forget(uid)
            await self._say(record, VmState.DELETING, released=not self.stuck)
            return
        if self.disks.get(uid, record.epoch) != record.epoch:
            self._guests.wrong.append(f"{uid} would resume an old disk on {self.name}")
        if self._fenced:
            return
        self.disks[uid] = record.epoch
        if record.powered and self._guests.running.get(uid) != self.name:
            self._guests.start(uid, self.name)
        await self._say(record, VmState.RUNNING if record.powered else VmState.STOPPED)

    def _forget(self, uid: str) -> None:
        self._guests.end(uid, self.name)
        self.disks.pop(uid, None)

    async def _say(self, record: VmRecord, state: VmState, *, released: bool = False) -> None:
        one = status(record, state, released=released)
        await self._bus.put(subjects.vm_status(self.name, record.uid), encode(one))


def _is_wish(entry: Entry) -> bool:
    return entry.key.endswith(f".{NODE_SPEC_KEY}")
