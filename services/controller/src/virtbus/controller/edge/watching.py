"""Watches of clients: pages, `synced`, changes, heartbeats, over request/reply (design §3).

What changed is a set of uids, not a queue of copies: a slow client gets the latest of each VM once
it reads, and memory is bounded by the number of VMs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from virtbus.bus.owners import owner_of
from virtbus.bus.ports import Bus, Request
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.view import matches
from virtbus.schemas import subjects
from virtbus.schemas.api import VmWatch, WatchReply
from virtbus.schemas.errors import Code, VirtbusError

PAGE = 100
BEAT_S = 5.0
RENEW_S = 30.0
CATCH_UP_S = 2.0
RESUME_WITHIN_S = 23 * 3600
"""Purge markers live 24 h: what was deleted before an older position can no longer be told."""


@dataclass(eq=False)
class Watcher:
    """One client's watch: the uids it has not been told of yet, and those it knows."""

    owner: str = ""
    """Whose VMs it may see; empty: all."""
    dirty: dict[str, None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self, uid: str) -> None:
        self.dirty[uid] = None
        self.wake.set()


@dataclass(frozen=True, slots=True)
class Position:
    """What `after` means: the highest revisions told, and when (UNIX seconds)."""

    revision: int
    status_revision: int
    at_s: int

    def __str__(self) -> str:
        return f"{self.revision}-{self.status_revision}-{self.at_s}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        try:
            revision, status_revision, at_s = (int(part) for part in text.split("-"))
        except ValueError:
            message = "after is not a position that a watch gave; leave it out for a full list"
            raise VirtbusError(Code.INVALID, "bad_position", message) from None
        return cls(revision, status_revision, at_s)


class Watches:
    """All watches of this controller."""

    def __init__(self, fleet: Fleet, bus: Bus, instance: str) -> None:
        self._fleet = fleet
        self._bus = bus
        self._instance = instance
        self._watchers: dict[Watcher, None] = {}
        self._catching_up: dict[Watcher, None] = {}
        self._count = 0

    def changed(self, uid: str | None) -> None:
        """Tell every watch that a VM's view may have changed; None: only the position did."""
        for watcher in self._catching_up:
            watcher.wake.set()
        if uid is not None:
            for watcher in self._watchers:
                watcher.touch(uid)

    @contextmanager
    def _watcher(self, account: str) -> Iterator[Watcher]:
        watcher = Watcher(owner_of(account))
        self._watchers[watcher] = None
        try:
            yield watcher
        finally:
            del self._watchers[watcher]

    async def serve(self, want: VmWatch, request: Request) -> None:
        """Answer one watch until it is no longer renewed."""
        with self._watcher(request.account) as watcher:
            uids = await self._start(want, watcher)
            self._count += 1
            renew = subjects.watch_renewal(self._instance, str(self._count))
            async with self._bus.subscribe(renew) as renewals:
                watcher.told.update(uids)
                await self._list(uids, request, renew)
                async with asyncio.TaskGroup() as group:
                    limit = asyncio.timeout(RENEW_S)

                    async def renewed() -> None:
                        async for _ in renewals:
                            limit.reschedule(asyncio.get_running_loop().time() + RENEW_S)

                    listener = group.create_task(renewed())
                    try:
                        async with limit:
                            await self._follow(want, watcher, request)
                    except TimeoutError:
                        pass
                    finally:
                        listener.cancel()

    async def _start(self, want: VmWatch, watcher: Watcher) -> list[str]:
        """The uids of the first list; with `after`, what changed since is marked dirty instead."""
        if want.after is None:
            watcher.dirty.clear()
            return [
                uid
                for uid in self._fleet.sorted_uids(want.namespace, dict(want.labels))
                if self._wanted(want, uid, watcher.owner)
            ]
        position = Position.parse(want.after)
        expired = self._now_s() - position.at_s > RESUME_WITHIN_S
        if expired or position.revision < self._fleet.forgotten_revision:
            message = "that position is too old; watch again without after for a full list"
            raise VirtbusError(Code.GONE, "position_expired", message)
        await self._catch_up(position, watcher)
        watcher.told.update(
            uid for uid in self._fleet.vms if self._wanted(want, uid, watcher.owner)
        )
        for uid, held in self._fleet.vms.items():
            status = self._fleet.status_of(held.record)
            if held.revision > position.revision or (
                status is not None and status[1] > position.status_revision
            ):
                watcher.touch(uid)
        for uid, revision in self._fleet.gone.items():
            if revision > position.revision:
                watcher.told.add(uid)
                watcher.touch(uid)
        return []

    async def _catch_up(self, position: Position, watcher: Watcher) -> None:
        """Wait until this controller has seen what the client saw through another one."""
        self._catching_up[watcher] = None
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._fleet.revision < position.revision:
                    await watcher.wake.wait()
                    watcher.wake.clear()
        except TimeoutError:
            message = "this controller has not seen that position; watch again without after"
            raise VirtbusError(Code.GONE, "position_unknown", message) from None
        finally:
            del self._catching_up[watcher]

    async def _list(self, uids: list[str], request: Request, renew: str) -> None:
        now_s = asyncio.get_running_loop().time()
        for start in range(0, len(uids), PAGE):
            views = [self._fleet.show(uid, now_s) for uid in uids[start : start + PAGE]]
            await request.stream(
                WatchReply(items=tuple(v for v in views if v), renew=renew, after=self._position())
            )
        await request.stream(WatchReply(synced=True, after=self._position(), renew=renew))

    async def _follow(self, want: VmWatch, watcher: Watcher, request: Request) -> None:
        """Tell what changes; a beat whenever nothing was told for BEAT_S, whatever others do."""
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(told_s + BEAT_S):
                    await watcher.wake.wait()
            except TimeoutError:
                await request.stream(WatchReply(beat=True, after=self._position()))
                told_s = loop.time()
                continue
            watcher.wake.clear()
            dirty, watcher.dirty = watcher.dirty, {}
            for uid in dirty:
                reply = self._news(uid, want, watcher)
                if reply is not None:
                    await request.stream(reply)
                    told_s = loop.time()

    def _news(self, uid: str, want: VmWatch, watcher: Watcher) -> WatchReply | None:
        """What to tell of a VM that may have changed; None where it is none of this watch's."""
        view = self._fleet.show(uid, asyncio.get_running_loop().time())
        if view is not None and self._wanted(want, uid, watcher.owner):
            watcher.told.add(uid)
            return WatchReply(change=view, after=self._position())
        if uid not in watcher.told:
            return None
        watcher.told.discard(uid)  # it ended, or its labels left the filter
        return WatchReply(gone=uid, after=self._position())

    def _wanted(self, want: VmWatch, uid: str, owner: str) -> bool:
        record = self._fleet.vms[uid].record
        return (
            (want.uid is None or want.uid == uid)
            and (want.name is None or want.name == record.name)
            and matches(record, want.namespace, dict(want.labels), owner)
        )

    def _now_s(self) -> float:
        return self._bus.sources.time_ns() / 1e9

    def _position(self) -> str:
        fleet = self._fleet
        return str(Position(fleet.revision, fleet.status_revision, int(self._now_s())))
