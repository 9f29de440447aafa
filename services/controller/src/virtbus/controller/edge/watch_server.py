"""Serves clients' watches: pages of a list, `synced`, then changes and heartbeats.

A watch's pending changes are a set of uids, so the number of VMs limits their memory. A slow
client gets only the latest state of each VM. A change of a VM costs one set insertion for each
watch of the VM's namespace or of all namespaces (ADR 0028).
"""

import asyncio
from typing import NamedTuple

from virtbus.bus.client.owners import account_of, owner_of
from virtbus.bus.client.ports import Bus, Request
from virtbus.controller.core import pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.view import matching_uids
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.pace import Pace
from virtbus.controller.edge.watch_sender import Watcher, WatchSender
from virtbus.schemas import subjects
from virtbus.schemas.api import VmWatch, WatchReply
from virtbus.schemas.errors import Code, VirtbusError

PAGE = 100
RENEW_S = 30.0
LOOK_S = 1.0
CATCH_UP_S = 2.0
RESUME_WITHIN_S = 23 * 3600
"""Maximum age of a position. Purge markers expire after 24 h, and older deletes are forgotten."""


class Position(NamedTuple):
    """The content of `after`: the highest revisions that a controller had seen at a UNIX time."""

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


class WatchServer:
    """All watches of this controller."""

    def __init__(self, fleet: Fleet, bus: Bus, instance: str) -> None:
        self._fleet = fleet
        self._bus = bus
        self._instance = instance
        self._watchers: dict[str | None, dict[Watcher, None]] = {}
        """By requested namespace; None: all namespaces."""
        self._catching_up: set[asyncio.Event] = set()
        self._pace = Pace()
        """Gives a turn to each page of a first list. So only one page is in memory, even if a
        thousand watches begin together."""
        self._teller = WatchSender(fleet, self._position)
        self._by_token: dict[str, Watcher] = {}
        self._never_renewed: dict[Watcher, None] = {}
        """Watches that were never renewed after their first list, the oldest first. Their clients
        may be gone."""

    def changed(self, uid: str | None) -> None:
        """Queue a VM whose view may have changed, for all watches that may cover the VM.

        None as uid means that only the position has changed.
        """
        for moved in self._catching_up:
            moved.set()
        if uid is None:
            return
        self._teller.changed(uid)
        held = self._fleet.vms.get(uid)
        namespaces = list(self._watchers) if held is None else [None, held.record.namespace]
        for namespace in namespaces:
            for watcher in self._watchers.get(namespace, ()):
                if watcher.want.uid in {None, uid}:
                    self._teller.touch(watcher, uid)

    async def run(self) -> None:
        renew = subjects.watch_renewals(self._instance)
        async with self._bus.subscribe(renew) as renewals, asyncio.TaskGroup() as group:
            group.create_task(self._teller.run())
            group.create_task(self._end_silent())
            async for message in renewals:
                watcher = self._by_token.get(message.subject.rpartition(".")[2])
                if watcher and watcher.request.account == account_of(message.headers):
                    watcher.renewed_s = asyncio.get_running_loop().time()
                    self._never_renewed.pop(watcher, None)

    def answer(self, held: StoredVm) -> pages.Plain:
        """Return a VM's view for an answer in msgpack. The next change of watches reuses it."""
        return self._teller.answer(held)

    def displace(self, account: str) -> bool:
        """End the account's oldest watch that was never renewed; return False if it has none.

        Clients must renew a watch after its first list (ADR 0028). So the client of a watch without
        a renewal is probably gone, and a new watch of the same account may replace that watch.
        """
        found = (one for one in self._never_renewed if one.request.account == account)
        watcher = next(found, None)
        if watcher is None:
            return False
        del self._never_renewed[watcher]
        message = "a new watch of your account took the place of this one, which was never renewed"
        if not watcher.over.done():
            watcher.over.set_exception(VirtbusError(Code.EXHAUSTED, "displaced", message))
        return True

    async def _end_silent(self) -> None:
        """End each watch RENEW_S after its last renewal, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = loop.time() - RENEW_S
            for watcher in tuple(self._by_token.values()):
                if watcher.renewed_s <= silent_s and not watcher.over.done():
                    watcher.over.set_result(None)

    def _leave(self, watcher: Watcher, token: str) -> None:
        self._teller.leave(watcher)
        self._never_renewed.pop(watcher, None)
        del self._by_token[token]
        namespace = watcher.want.namespace
        del self._watchers[namespace][watcher]
        if not self._watchers[namespace]:
            del self._watchers[namespace]

    async def serve(self, want: VmWatch, request: Request) -> "asyncio.Future[None]":
        """Send a watch's first list, and begin to serve the watch.

        Return a future that is done at the end of the watch.

        The subject for renewals has a random token that only the client gets. Only renewals from
        the client's account count.
        """
        token = self._bus.sources.uuid7()
        watcher = Watcher(want, request, owner_of(request.account))
        self._watchers.setdefault(want.namespace, {})[watcher] = None
        self._by_token[token] = watcher
        try:
            if want.after is not None:
                await self._catch_up(Position.parse(want.after))
            async with self._pace.turn(request.account):
                uids = self._start(want, watcher)
                watcher.known.update(uids)
            await self._list(uids, request, subjects.watch_renewal(self._instance, token))
        except BaseException:
            self._leave(watcher, token)
            raise
        watcher.renewed_s = asyncio.get_running_loop().time()
        self._teller.follow(watcher)
        self._never_renewed[watcher] = None
        watcher.over.add_done_callback(lambda _: self._leave(watcher, token))
        return watcher.over

    def _start(self, want: VmWatch, watcher: Watcher) -> list[str]:
        """Return the uids of the first list. With `after`, return none and queue later changes."""
        if want.after is None:
            watcher.dirty.clear()
            return [
                uid
                for uid in matching_uids(self._fleet.vms, want.namespace, dict(want.labels))
                if self._teller.wanted(watcher, uid)
            ]
        position = Position.parse(want.after)
        watcher.known.update(uid for uid in self._fleet.vms if self._teller.wanted(watcher, uid))
        for uid, held in self._fleet.vms.items():
            status, changed = self._fleet.status_of(held.record), held.revision > position.revision
            if changed and self._teller.wanted(watcher, uid, any_labels=True):
                watcher.known.add(uid)  # before the change, the VM may have had matching labels
            if changed or (status is not None and status[1] > position.status_revision):
                self._teller.touch(watcher, uid)
        for uid, revision in self._fleet.gone.items():
            if revision > position.revision:
                watcher.known.add(uid)
                self._teller.touch(watcher, uid)
        return []

    async def _catch_up(self, position: Position) -> None:
        """Wait until this controller has seen the position.

        Raises:
            VirtbusError: 410 `position_expired`: this controller may have forgotten deletes after
                the position. 410 `position_unknown`: this controller did not reach the position
                within CATCH_UP_S.
        """
        expired = self._now_s() - position.at_s > RESUME_WITHIN_S
        if expired or position.revision < self._fleet.forgotten_revision:
            message = "that position is too old; watch again without after for a full list"
            raise VirtbusError(Code.GONE, "position_expired", message)
        moved = asyncio.Event()
        self._catching_up.add(moved)
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._fleet.revision < position.revision:
                    await moved.wait()
                    moved.clear()
        except TimeoutError:
            message = "this controller has not seen that position; watch again without after"
            raise VirtbusError(Code.GONE, "position_unknown", message) from None
        finally:
            self._catching_up.discard(moved)

    async def _list(self, uids: list[str], request: Request, renew: str) -> None:
        now_s = asyncio.get_running_loop().time()
        views = ((uid, view) for uid in uids if (view := self._fleet.show(uid, now_s)) is not None)
        as_json = request.wants_json
        found = pages.split(views, as_json=as_json, most=PAGE) if uids else iter(())
        while True:
            async with self._pace.turn(request.account):
                page = next(found, None)
                if page is None:
                    break
                reply = WatchReply(renew=renew, after=self._position())
                await request.stream(pages.plain(reply, as_json=as_json) | {"items": page.items})
        await request.stream(WatchReply(synced=True, after=self._position(), renew=renew))

    def _now_s(self) -> float:
        return self._bus.sources.time_ns() / 1e9

    def _position(self) -> str:
        fleet = self._fleet
        return str(Position(fleet.revision, fleet.status_revision, int(self._now_s())))
