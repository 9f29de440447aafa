"""Implements `ports.Bus` over a NATS connection, with one collaborator per kind of traffic."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

from virtbus.bus.client.consumers import NodeConsumer, OwnConsumer
from virtbus.bus.client.core_messages import CoreMessages
from virtbus.bus.client.event_writer import EventWriter, QueuedEvent, stored_id
from virtbus.bus.client.link import Link
from virtbus.bus.client.ports import Gate, StoredMessage, Watch
from virtbus.bus.client.records import Records
from virtbus.bus.client.requests import headers_out
from virtbus.bus.client.stored_sizes import fact_body
from virtbus.bus.client.watch import watching
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import Background

FLUSH_EVENTS_S = 2.0


class NatsBus(CoreMessages):
    """One connection, made by `connection.connect`. `ports.Bus` documents most methods."""

    def __init__(self, link: Link, settings: BusSettings, name: str, tasks: Background) -> None:
        super().__init__(link, name)
        self._records = Records(link, settings)
        self._events = EventWriter(self._records)
        self._tasks = tasks
        tasks.start(self._events.pump())
        self._closed = False
        self.get = self._records.get
        self.put = self._records.put
        self.purge = self._records.purge
        self.batch = self._records.batch
        self.fill = self._records.fill
        self.report = self._records.report
        self.extent = self._records.extent
        self.trim = self._records.trim

    @property
    def clustered(self) -> bool:
        """Return True if the server belongs to a cluster. Streams then have three replicas."""
        return self._link.clustered

    @property
    def generation(self) -> int:
        """Return the number of connections so far. A new connection can mean a server's restart."""
        return self._link.generation

    async def renewed(self, generation: int) -> int:
        """Wait for a connection later than `generation`; return its number."""
        changed = asyncio.Event()
        forget = self._link.on_change(changed.set)
        try:
            while self._link.generation <= generation or not self._link.connected:
                changed.clear()
                await changed.wait()
        finally:
            forget()
        return self._link.generation

    @property
    def dropped_events(self) -> int:
        """Return the number of events lost by a full queue or a refused write, since the start."""
        return self._events.dropped

    def watch(self, *filters: str) -> AbstractAsyncContextManager[Watch]:
        source = OwnConsumer(self._records.call, filters, self._name)
        return watching(self._link, source, " ".join(filters))

    def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AbstractAsyncContextManager[Watch]:
        source = NodeConsumer(self._records.call, node, service)
        return watching(self._link, source, f"{node}/{service}", gate)

    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        body = fact_body(subject, value, lambda one: self._enveloped(subject, one, message_id))
        known_as = stored_id(subject, message_id)
        self._events.add(QueuedEvent(subject, body, message_id, headers_out(), known_as))

    def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> Awaitable[list[StoredMessage]]:
        return self._records.history(subject_filter, after=after, limit=limit)

    async def js_api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call JetStream's API, for example `STREAM.CREATE.KV_vm`, and return its answer.

        An inconclusive call is repeated, so it may take effect twice.

        Raises:
            ApiError: the call was refused, with JetStream's code.
        """
        return await self._records.call(f"$JS.API.{verb}", body)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._events.flush(FLUSH_EVENTS_S if self._link.connected else 0.0)
        finally:
            self._tasks.cancel()
            await self._tasks.settle(3.0)
