"""Sends requests that have one answer or many."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from virtbus.bus.client.codec import envelope, unpack_answer
from virtbus.bus.client.link import Link, LinkLostError, Raw
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.message_format import CONTENT_TYPE, ERROR_CODE, MSGPACK, TRACEPARENT
from virtbus.bus.client.tracing import current_traceparent
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.bus.runtime.backoff import Attempts
from virtbus.bus.runtime.sources import REAL, Sources

STREAM_CAPACITY = 4096
STREAM_BYTES = 64 * 1024 * 1024
_CODE = re.compile(r"[0-9]{3}")


def headers_out() -> dict[str, str]:
    """Return the headers of an outgoing message: content type and current trace."""
    headers = {CONTENT_TYPE: MSGPACK}
    traceparent = current_traceparent()
    if traceparent:
        headers[TRACEPARENT] = traceparent
    return headers


def data_of(raw: Raw) -> Any:
    """Return the data of an answer.

    Raises:
        VirtbusError: the answer is the service's error; its texts have a limited length.
        BusError: the answer has an unknown format.
    """
    data = unpack_answer(raw.body, raw.headers.get(CONTENT_TYPE, MSGPACK))
    if ERROR_CODE in raw.headers:
        from virtbus.schemas.errors import ErrorBody, VirtbusError

        body = data.get("error") if isinstance(data, dict) else None
        if not isinstance(body, dict):
            code = raw.headers[ERROR_CODE]
            text = raw.headers.get("Nats-Service-Error", "the service failed")
            number = int(code) if _CODE.fullmatch(code) else 500
            body = {"code": number, "reason": "error", "message": text}
        try:
            error_body = ErrorBody.model_validate(body)
        except ValueError as error:  # includes pydantic's errors
            msg = "the service refused the request, but its error cannot be read"
            raise BusError(msg) from error
        raise VirtbusError.of(error_body)
    return data


class RequestClient:
    """Sends the requests of one connection. `source` is the sender's name in the envelope."""

    def __init__(self, link: Link, source: str, sources: Sources = REAL) -> None:
        self._link = link
        self._source = source
        self._sources = sources

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        identity = request_id or self._sources.uuid7()
        headers = headers_out()
        sent, failure = False, ""
        attempts = Attempts(timeout_s, self._sources)
        async for left_s in attempts:
            body = envelope(
                subject,
                value,
                message_id=identity,
                source=self._source,
                timeout_ms=int(left_s * 1000),
            )
            try:
                await self._link.up(left_s)
                raw = await self._link.ask(
                    subject, body, headers=headers, timeout_s=attempts.left_s
                )
                if raw.status != "503":
                    return data_of(raw)
                failure = "nobody serves this now"
            except LinkLostError as error:
                sent, failure = True, str(error)
            except UnavailableError as error:
                failure = str(error)
            except TimeoutError:
                sent, failure = True, f"no answer in {timeout_s:g} s"
        if sent:
            msg = f"{subject}: {failure}; repeat it with the id {identity}"
            raise OutcomeUnknownError(msg)
        msg = f"{subject}: {failure}"
        raise UnavailableError(msg)

    @asynccontextmanager
    async def request_stream(
        self, subject: str, value: Any, *, idle_timeout_s: float
    ) -> AsyncIterator[AsyncIterator[Any]]:
        await self._link.up(idle_timeout_s)
        replies = _Replies(self._link, subject, idle_timeout_s)
        forget = self._link.on_change(replies.raws.wake)
        inbox = self._link.inbox()
        subscription = await self._link.open(inbox, replies.raws.put)
        try:
            body = envelope(
                subject,
                value,
                message_id=self._sources.uuid7(),
                source=self._source,
                timeout_ms=int(idle_timeout_s * 1000),
            )
            await self._link.send(subject, body, headers=headers_out(), reply=inbox)
            yield replies
        finally:
            forget()
            await subscription.close()


class _Replies:
    """Yields the replies to one request. An overflow of the bounded queue raises an error."""

    def __init__(self, link: Link, subject: str, idle_timeout_s: float) -> None:
        self._link = link
        self._generation = link.generation
        self._subject = subject
        self._idle_timeout_s = idle_timeout_s
        self.raws: Mailbox[Raw] = Mailbox(
            STREAM_CAPACITY, capacity_bytes=STREAM_BYTES, size_of=lambda raw: len(raw.body)
        )

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while True:
            if self.raws.overflowed:
                raise self._ended("too many replies are unread; start it again")
            raw = self.raws.take()
            if raw is not None:
                if raw.status == "503":
                    raise self._ended("nobody serves this now")
                return data_of(raw)
            if self._link.generation != self._generation or not self._link.connected:
                raise self._ended("the connection was lost; start it again")
            if not await self.raws.wait(self._idle_timeout_s):
                raise self._ended(f"nothing came for {self._idle_timeout_s:g} s")

    def _ended(self, why: str) -> UnavailableError:
        return UnavailableError(f"{self._subject}: {why}")
