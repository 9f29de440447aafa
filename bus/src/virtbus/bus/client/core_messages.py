"""Implements the core NATS messages, requests and services of `ports.Bus` over a connection."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from virtbus.bus.client.codec import envelope
from virtbus.bus.client.link import Link, Raw
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.ports import Endpoint, Message, ServiceInfo
from virtbus.bus.client.requests import RequestClient, headers_out
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.sources import REAL, Sources

log = logging.getLogger(__name__)

SUBSCRIBE_CAPACITY = 2048
SUBSCRIBE_BYTES = 16 * 1024 * 1024


class CoreMessages:
    """The methods of `ports.Bus` that need no JetStream; `ports.Bus` documents each of them."""

    def __init__(self, link: Link, name: str, sources: Sources = REAL) -> None:
        self.sources = sources
        self._name = name
        self._link = link
        calls = RequestClient(link, name, sources)
        self.request = calls.request
        self.request_stream = calls.request_stream

    @property
    def connected(self) -> bool:
        return self._link.connected

    def _enveloped(self, subject: str, value: Any, message_id: str) -> bytes:
        at_ns = self.sources.time_ns()
        return envelope(subject, value, message_id=message_id, source=self._name, at_ns=at_ns)

    async def publish(self, subject: str, value: Any) -> None:
        body = self._enveloped(subject, value, self.sources.uuid7())
        try:
            await self._link.send(subject, body, headers=headers_out())
        except BusError as error:
            log.debug("%s dropped: %s", subject, error)

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[AsyncIterator[Message]]:
        messages: Mailbox[Message] = Mailbox(
            SUBSCRIBE_CAPACITY,
            capacity_bytes=SUBSCRIBE_BYTES,
            size_of=lambda message: len(message.body),
        )

        def receive(raw: Raw) -> None:
            messages.put(Message(raw.subject, raw.body, raw.headers, raw.reply))

        subscription = await self._link.open(subject, receive)
        try:
            yield messages
        finally:
            await subscription.close()

    def serve(
        self, info: ServiceInfo, endpoints: Sequence[Endpoint]
    ) -> AbstractAsyncContextManager[None]:
        from virtbus.bus.client.endpoints import serving  # only services need this module

        return serving(self._link, info, endpoints)
