"""Sends changes and heartbeats to clients' watches, in short slices of the event loop's time.

One task serves all watches, so a change that affects a thousand watches wakes only one task. The
task sends a few changes to each watch in turn. Between two slices, other requests run (ADR 0028).
Each change is encoded once for all watches.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from virtbus.bus.client.answers import render
from virtbus.bus.client.ports import Rendered, Request
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core import pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.view import matches
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.schemas.api import VmWatch, WatchReply

BEAT_S = 5.0
SLICE_S = 0.002
REST = 2.0
"""Seconds of rest for each second of work, while more than CROWD watches wait."""
MOST_REST_S = 0.1
"""Maximum rest after a slice. A slice includes waits for sends, so a long slice may be little work.
"""
CROWD = 8
"""The task rests only while more than this number of watches wait."""
SENT_AT_ONCE = 16
CHANGE_FRESH_S = 1.0
"""Time for which an encoded view is reused. The time is short, because some states in a view depend
on the present time."""
CHANGES_KEPT = 8


@dataclass(eq=False, slots=True)
class Watcher:
    """One client's watch: the uids with unsent changes, and the uids that the client knows."""

    want: VmWatch
    request: Request
    owner: str = ""
    """The owner of the VMs that the client may see; empty if the client may see all VMs."""
    dirty: dict[str, None] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    renewed_s: float = math.inf
    """The loop's time of the last renewal; infinite until the first list is sent."""
    over: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the watch has ended. Its exception is the error that ended the watch."""


class _View(NamedTuple):
    """A VM's view in an answer: when it was made, of which revision, and the position then."""

    made_s: float
    revision: int
    after: str
    plain: pages.Plain

    def shows(self, held: StoredVm, now_s: float) -> bool:
        return self.revision == held.revision and now_s - self.made_s <= CHANGE_FRESH_S


class WatchSender:
    """Serves the watches whose first list was sent.

    `position` returns the present position. Each reply has the position as `after`, so that a
    client can resume its watch there.
    """

    def __init__(self, fleet: Fleet, position: Callable[[], str]) -> None:
        self._fleet = fleet
        self._position = position
        self._told_s: dict[Watcher, float] = {}
        """By served watch: the loop's time of its last reply. The oldest reply is first."""
        self._ready: dict[Watcher, None] = {}
        self._some = asyncio.Event()
        self._changes: dict[tuple[str, bool], tuple[float, Rendered]] = {}
        """By uid of a VM, and True for JSON: the time of an encoded change, and the change."""
        self._views: dict[str, _View] = {}
        """By uid of a VM: the view in an answer that was just sent."""

    def follow(self, watcher: Watcher) -> None:
        """Send changes to a watch from now on."""
        self._told_s[watcher] = asyncio.get_running_loop().time()
        self._wake(watcher)

    def leave(self, watcher: Watcher) -> None:
        self._told_s.pop(watcher, None)
        self._ready.pop(watcher, None)

    def changed(self, uid: str) -> None:
        self._changes.pop((uid, False), None)
        self._changes.pop((uid, True), None)
        self._views.pop(uid, None)

    def answer(self, held: StoredVm) -> pages.Plain:
        """Return a VM's view as plain data for msgpack, and keep it for the change that follows.

        A create sends the same view twice: to the client, and to the watches.
        """
        now_s = asyncio.get_running_loop().time()
        view = pages.plain(self._fleet.show_held(held, now_s), as_json=False)
        if len(self._views) >= CHANGES_KEPT:
            self._views.clear()
        self._views[held.record.uid] = _View(now_s, held.revision, self._position(), view)
        return view

    def touch(self, watcher: Watcher, uid: str) -> None:
        """Queue a VM for a watch. The change is sent soon after `follow`."""
        watcher.dirty[uid] = None
        if watcher in self._told_s:
            self._wake(watcher)

    def _wake(self, watcher: Watcher) -> None:
        self._ready[watcher] = None
        self._some.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait()
            begun_s = loop.time()
            while self._ready and loop.time() - begun_s < SLICE_S:
                watcher = next(iter(self._ready))
                del self._ready[watcher]
                await self._serve(watcher)
            crowded = len(self._ready) > CROWD
            rest_s = min(REST * (loop.time() - begun_s), MOST_REST_S) if crowded else 0.0
            await asyncio.sleep(rest_s)

    async def _wait(self) -> None:
        """Wait until a watch has changes, or BEAT_S have passed since a watch's last reply."""
        loop = asyncio.get_running_loop()
        while True:
            for watcher, told_s in self._told_s.items():
                if told_s + BEAT_S > loop.time():
                    break
                self._ready[watcher] = None
            if self._ready:
                return
            self._some.clear()
            first_s = next(iter(self._told_s.values()), None)
            await wait_for_event(
                self._some, None if first_s is None else first_s + BEAT_S - loop.time()
            )

    async def _serve(self, watcher: Watcher) -> None:
        try:
            await self._tell(watcher)
        except Exception as error:  # noqa: BLE001  boundary: the error ends this watch
            self._told_s.pop(watcher, None)
            if not watcher.over.done():
                watcher.over.set_exception(error)
        if watcher.dirty and watcher in self._told_s:
            self._ready[watcher] = None

    async def _tell(self, watcher: Watcher) -> None:
        """Send some changes, or a heartbeat after BEAT_S without a reply to this watch."""
        now_s = asyncio.get_running_loop().time()
        silent_s = now_s - self._told_s[watcher]
        for uid in tuple(islice(watcher.dirty, SENT_AT_ONCE)):
            watcher.dirty.pop(uid, None)
            reply = self._news(uid, watcher)
            if reply is not None:
                await watcher.request.stream(reply)
                silent_s = 0.0
        if silent_s >= BEAT_S:
            await watcher.request.stream(WatchReply(beat=True, after=self._position()))
            silent_s = 0.0
        if not silent_s and self._told_s.pop(watcher, None) is not None:
            self._told_s[watcher] = now_s

    def wanted(self, watcher: Watcher, uid: str, *, any_labels: bool = False) -> bool:
        """Return True if the watch covers a VM of the fleet.

        With `any_labels`, return True if the watch may have covered the VM earlier: of the compared
        fields, only a VM's labels can change.
        """
        want, record = watcher.want, self._fleet.vms[uid].record
        labels = {} if any_labels else dict(want.labels)
        return (
            (want.uid is None or want.uid == uid)
            and (want.name is None or want.name == record.name)
            and matches(record, want.namespace, labels, watcher.owner)
        )

    def _news(self, uid: str, watcher: Watcher) -> Rendered | pages.Plain | None:
        """Return the reply about a VM.

        None means that the watch does not cover the VM, and that the client does not know the VM.
        """
        as_json = watcher.request.wants_json
        if uid in self._fleet.vms and self.wanted(watcher, uid):
            watcher.known.add(uid)
            return self._change(uid, as_json=as_json)
        if uid not in watcher.known:
            return None
        watcher.known.discard(uid)  # the VM was deleted, or no longer matches the filter
        return pages.plain(WatchReply(gone=uid, after=self._position()), as_json=as_json)

    def _change(self, uid: str, *, as_json: bool) -> Rendered:
        """Return a VM's encoded change.

        The position in the change is never newer than the view: a client that resumes from the
        position misses nothing.
        """
        now_s = asyncio.get_running_loop().time()
        made_s, change = self._changes.get((uid, as_json), (-math.inf, Rendered()))
        if now_s - made_s > CHANGE_FRESH_S:
            change = self._rendered(self._fleet.vms[uid], now_s, as_json=as_json)
            if len(self._changes) >= CHANGES_KEPT:
                self._changes.clear()
            self._changes[uid, as_json] = now_s, change
        return change

    def _rendered(self, held: StoredVm, now_s: float, *, as_json: bool) -> Rendered:
        sent = None if as_json else self._views.pop(held.record.uid, None)
        if sent is not None and sent.shows(held, now_s):
            after, item = sent.after, sent.plain
        else:
            after, view = self._position(), self._fleet.show_held(held, now_s)
            item = pages.plain(view, as_json=as_json)
        bare = pages.plain(WatchReply(after=after), as_json=as_json)
        change = Rendered(render(bare | {"change": item}, as_json=as_json))
        if len(change) > pages.ITEM_BYTES:
            item, _ = pages.fitting(self._fleet.show_held(held, now_s), as_json=as_json)
            change = Rendered(render(bare | {"change": item}, as_json=as_json))
        return change
