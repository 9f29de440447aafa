"""Implements `ports.Bus` in memory for tests, deterministic and without threads.

Several `MemoryBus` connections share a `MemoryServer`. A test injects faults: `server.drop` loses
core messages, `bus.disconnect()` cuts one connection, `bus.faults` lists faults of the next writes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

from virtbus.bus.client.core_messages import CoreMessages
from virtbus.bus.client.event_writer import RecentEvents, stored_id
from virtbus.bus.client.filters import matches
from virtbus.bus.client.gated_watch import GatedWatch
from virtbus.bus.client.link import Raw
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.memory_link import MemoryLink, MemoryServer
from virtbus.bus.client.memory_stream import MemoryStream
from virtbus.bus.client.ports import (
    HISTORY_BYTES,
    Entry,
    Extent,
    Gate,
    StoredMessage,
    StreamReport,
    Watch,
    WatchMark,
    Write,
)
from virtbus.bus.client.records import stream_of
from virtbus.bus.client.requests import headers_out
from virtbus.bus.client.stored_sizes import check_written, fact_body
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.runtime.sources import REAL, Sources

__all__ = ["Fault", "MemoryBus", "MemoryServer"]

CAPACITY = 65_536


class Fault(StrEnum):
    """An injected fault of one write."""

    UNAVAILABLE = "unavailable"
    """The write raises UnavailableError and is not stored."""
    LOST = "lost"
    """The write raises OutcomeUnknownError and is not stored."""
    STORED = "stored"
    """The write raises OutcomeUnknownError but is stored."""


class MemoryWatch:
    """A `ports.Watch` that lists at its start, after a reconnect and after `relist`."""

    def __init__(self, link: MemoryLink, filters: tuple[str, ...]) -> None:
        self._link = link
        self._filters = filters
        self._items: Mailbox[Entry | WatchMark] = Mailbox(CAPACITY)
        self._shelf = link.server.shelf(filters[0])

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        return self._items

    def relist(self) -> None:
        self._items.put(WatchMark.RESET)
        for entry in self._shelf.listed(self._filters):
            self._items.put(entry)
        self._items.put(WatchMark.SYNCED)

    def changed(self) -> None:
        if self._link.connected:
            self.relist()

    def seen(self, entry: Entry) -> None:
        if self._link.connected and any(matches(one, entry.key) for one in self._filters):
            self._items.put(entry)

    def start(self) -> Callable[[], None]:
        self.relist()
        self._shelf.seen.append(self.seen)
        forget = self._link.on_change(self.changed)

        def stop() -> None:
            self._shelf.seen.remove(self.seen)
            forget()

        return stop


class MemoryBus(CoreMessages):
    """One connection to a MemoryServer; `ports.Bus` documents each method."""

    _link: MemoryLink

    def __init__(
        self,
        server: MemoryServer,
        name: str = "memory",
        sources: Sources = REAL,
        link: MemoryLink | None = None,
    ) -> None:
        super().__init__(link or MemoryLink(server), name, sources)
        self.server = server
        self.faults: deque[Fault] = deque()
        self._recent = RecentEvents()

    def disconnect(self) -> None:
        """Cut this connection. Pending requests fail, and watches get no more entries."""
        self._link.cut()

    def reconnect(self) -> None:
        self._link.join()

    # --- records --------------------------------------------------------------------------
    async def get(self, key: str) -> Entry | None:
        self._reachable()
        return self.server.shelf(key).last(key)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        expect_over: str | None = None,
        ttl_s: float | None = None,
    ) -> int:
        check_written(key, value)
        shelf = self.server.shelf(key)

        def store() -> int:
            shelf.check(key, value, expect, expect_over)
            return shelf.apply(key, value, ttl_s=ttl_s).revision

        return await self._write(store, shelf, [key], ttl_s)

    async def purge(
        self,
        key: str,
        *,
        expect: int | None = None,
        marker_ttl_s: float | None = None,
        why: bytes = b"",
    ) -> int:
        shelf = self.server.shelf(key)

        def store() -> int:
            shelf.check(key, b"", expect, None)
            return shelf.apply(key, None, ttl_s=marker_ttl_s, why=why).revision

        return await self._write(store, shelf, [key], marker_ttl_s)

    async def batch(self, writes: Sequence[Write]) -> int:
        if not writes:
            msg = "an empty batch"
            raise ValueError(msg)
        for one in writes:
            check_written(one.key, one.value or b"")
        shelf = self.server.shelf(writes[0].key)

        def store() -> int:
            for one in writes:
                shelf.check(one.key, one.value or b"", one.expect, one.expect_over)
            stored = [shelf.apply(w.key, w.value, ttl_s=w.ttl_s, why=w.why) for w in writes]
            return stored[-1].revision

        ttl_s = max((one.ttl_s for one in writes if one.ttl_s is not None), default=None)
        return await self._write(store, shelf, [one.key for one in writes], ttl_s)

    def _reachable(self) -> None:
        if not self._link.connected:
            msg = "no connection to the bus"
            raise UnavailableError(msg)

    async def _write(
        self,
        store: Callable[[], int],
        shelf: MemoryStream,
        keys: Sequence[str],
        ttl_s: float | None,
    ) -> int:
        del keys  # for subclasses that check permissions
        await asyncio.sleep(0)  # other tasks run between two writes, as over a network
        self._reachable()
        fault = self.faults.popleft() if self.faults else None
        if fault is Fault.UNAVAILABLE:
            msg = "the write did not happen (injected)"
            raise UnavailableError(msg)
        if fault is not Fault.LOST:
            revision = store()
            if ttl_s is not None:
                asyncio.get_running_loop().call_later(ttl_s + 0.001, shelf.expire)
            if fault is None:
                return revision
        msg = "the write may have happened (injected)"
        raise OutcomeUnknownError(msg)

    @asynccontextmanager
    async def watch(self, *filters: str) -> AsyncIterator[Watch]:
        watch = MemoryWatch(self._link, filters)
        stop = watch.start()
        try:
            yield watch
        finally:
            stop()

    @asynccontextmanager
    async def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AsyncIterator[Watch]:
        del service
        async with self.watch(f"$KV.vm.{node}.>") as watch:
            yield watch if gate is None else GatedWatch(watch, gate)

    async def fill(self, bucket: str) -> float:
        self._reachable()
        shelf = self.server.shelf(f"$KV.{bucket}.x")
        return shelf.size_bytes / shelf.max_bytes if shelf.max_bytes else 0.0

    async def extent(self, subject_filter: str) -> Extent:
        self._reachable()
        stream, shelf = stream_of(subject_filter), self.server.shelf(subject_filter)
        kept = self.server.stored.get(stream, [])
        size = shelf.size_bytes + sum(len(one.body) for one in kept)
        last = kept[-1].sequence if kept else shelf.revision
        first = kept[0].sequence if kept else 1
        return Extent(first, last, len(kept) or len(shelf.entries), size, shelf.max_bytes)

    async def trim(self, subject_filter: str, *, keep: int = 0) -> None:
        self._reachable()
        kept = self.server.stored.get(stream_of(subject_filter), [])
        own = [one for one in kept if matches(subject_filter, one.subject)]
        for one in own[: max(0, len(own) - keep)]:
            kept.remove(one)
        entries = self.server.shelf(subject_filter).entries
        keys = [key for key in entries if matches(subject_filter, key)]
        keys.sort(key=lambda key: entries[key].revision)
        for key in keys[: max(0, len(keys) - keep)]:
            del entries[key]

    async def report(self) -> list[StreamReport]:
        self._reachable()
        return [
            StreamReport(
                name,
                len(shelf.entries) or len(self.server.stored.get(name, ())),
                shelf.size_bytes / shelf.max_bytes if shelf.max_bytes else 0.0,
                1,
            )
            for name, shelf in self.server.shelves.items()
        ]

    # --- events ---------------------------------------------------------------------------
    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        body = fact_body(subject, value, lambda one: self._enveloped(subject, one, message_id))
        stream = stream_of(subject)
        shelf = self.server.shelf(subject)
        kept = self.server.stored.setdefault(stream, [])
        known_as = stored_id(subject, message_id)
        if self._recent.again(subject, message_id, shelf.clock_ns() / 1e9):
            return
        number = kept[-1].sequence + 1 if kept else 1
        if shelf.message_ids.setdefault(known_as, number) != number:
            return
        kept.append(StoredMessage(subject, body, number, self.server.clock_ns()))
        self.server.route(Raw(subject, body, headers=headers_out()))

    def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> Awaitable[list[StoredMessage]]:
        return self._history(subject_filter, after, limit)

    async def _history(self, subject_filter: str, after: int, limit: int) -> list[StoredMessage]:
        self._reachable()
        kept = self.server.stored.get(stream_of(subject_filter), [])
        found = [m for m in kept if m.sequence > after and matches(subject_filter, m.subject)]
        size_bytes = 0
        for count, message in enumerate(found[:limit], start=1):
            size_bytes += len(message.body)
            if size_bytes > HISTORY_BYTES:
                return found[:count]
        return found[:limit]

    async def aclose(self) -> None:
        if self._link.connected:
            self._link.cut()
