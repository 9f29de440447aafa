"""Reads and writes records over JetStream. A write succeeds, fails, or has an unknown outcome."""

import asyncio
import base64
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from virtbus.bus.client.jetstream_errors import (
    NO_MESSAGE,
    ApiError,
    QueuedError,
    answer_of,
    why_again,
)
from virtbus.bus.client.link import SEQUENCE, Link, LinkLostError, Raw
from virtbus.bus.client.ports import (
    HISTORY_BYTES,
    Entry,
    EntryKind,
    Extent,
    StoredMessage,
    StreamReport,
    Write,
)
from virtbus.bus.client.stored_sizes import check_written
from virtbus.bus.client.stream_info import extent_of, fill_of, report_of
from virtbus.bus.client.timestamps import time_ns
from virtbus.bus.errors import ConflictError, OutcomeUnknownError, UnavailableError
from virtbus.bus.runtime.backoff import Attempts
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import random_token

log = logging.getLogger(__name__)

EXPECT = "Nats-Expected-Last-Subject-Sequence"
EXPECT_OVER = "Nats-Expected-Last-Subject-Sequence-Subject"
MESSAGE_ID = "Nats-Msg-Id"
TTL = "Nats-TTL"
OPERATION = "KV-Operation"
CATCH_UP_S = 2.0
"""Time limit for a lagging replica to receive the leader's last message."""
_ENDS_OF_HISTORY = frozenset({"204", "404"})
"""Statuses after the last message (204), and instead of messages if none exist (404)."""
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d{1,20})$")
_MARKER = "Nats-Marker-Reason"
_PURGE = {OPERATION: "PURGE"}
"""Headers of a purge marker.

A bucket keeps one message per key, so a purge needs no `Nats-Rollup`. Buckets that nodes write
refuse rollups, because `Nats-Rollup: all` would empty the bucket.
"""


def stream_of(subject: str) -> str:
    """Return the name of the stream that stores a subject or filter: `$KV.vm.>` is in KV_vm."""
    tokens = subject.split(".")
    if tokens[0] == "$KV" and len(tokens) > 1:
        return f"KV_{tokens[1]}"
    if tokens[0] == "virtbus" and len(tokens) > 1 and tokens[1] in {"evt", "dlq"}:
        return tokens[1].upper()
    msg = f"{subject} is in no stream"
    raise ValueError(msg)


def kind_of(headers: Mapping[str, str]) -> EntryKind:
    """Return PURGE for a purge, a delete, and the server's marker after a TTL."""
    if _MARKER in headers or headers.get(OPERATION) in {"PURGE", "DEL"}:
        return EntryKind.PURGE
    return EntryKind.PUT


def entry_of(key: str, headers: Mapping[str, str], body: bytes, sequence: int, at_ns: int) -> Entry:
    """Return a message as an entry. The body of a purge marker is its `why`."""
    kind = kind_of(headers)
    value, why = (body, b"") if kind is EntryKind.PUT else (b"", body)
    return Entry(key, value, sequence, kind, at_ns, why)


def ttl_header(ttl_s: float) -> str:
    """Return the value of `Nats-TTL`: whole seconds, at least 1 (ADR-43)."""
    return f"{max(1, math.ceil(ttl_s))}s"


def _headers_of(block: str) -> dict[str, str]:
    """Return the headers of a stored message (base64 of a NATS/1.0 block)."""
    lines = base64.b64decode(block).decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass(slots=True)
class _Sent:
    before: bool = False
    """True if an earlier attempt of `_persist` may have had an effect."""


class Records:
    """Reads and writes over one connection. `ports.Bus` documents methods without a docstring."""

    def __init__(self, link: Link, settings: BusSettings) -> None:
        self._link = link
        self._settings = settings

    async def call(
        self, subject: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Call JetStream's API and return its answer. An inconclusive call is repeated."""
        payload = json.dumps(body).encode() if body is not None else b""
        raw = await self._persist(subject, payload, {}, timeout_s=timeout_s)
        return answer_of(raw)

    async def _persist(
        self,
        subject: str,
        body: bytes,
        headers: dict[str, str],
        *,
        timeout_s: float | None = None,
        sent: "_Sent | None" = None,
    ) -> Raw:
        """Repeat a request until an answer is conclusive; return that answer.

        Retries have the same Nats-Msg-Id, so JetStream stores a write once.

        Raises:
            UnavailableError: no attempt had an effect.
            OutcomeUnknownError: an attempt may have had an effect.
        """
        sent = sent or _Sent()
        failure = ""
        attempts = Attempts(timeout_s or self._settings.write_timeout_s)
        async for left_s in attempts:
            try:
                await self._link.up(left_s)
                raw = await self._link.ask(
                    subject, body, headers=headers, timeout_s=attempts.left_s
                )
                failure = why_again(raw)
                if not failure:
                    return raw
            except LinkLostError as error:
                sent.before, failure = True, str(error)
            except UnavailableError as error:
                failure = str(error)
            except TimeoutError:
                sent.before, failure = True, "no answer in time"
        if sent.before:
            msg = f"{subject}: {failure}; it may have had an effect, repeat it with the same id"
            raise OutcomeUnknownError(msg)
        msg = f"{subject}: {failure}"
        raise UnavailableError(msg)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        expect_over: str | None = None,
        ttl_s: float | None = None,
    ) -> int:
        headers = self._expectation(expect, expect_over)
        if ttl_s is not None:
            headers[TTL] = ttl_header(ttl_s)
        return await self.store(key, value, headers)

    async def purge(
        self,
        key: str,
        *,
        expect: int | None = None,
        marker_ttl_s: float | None = None,
        why: bytes = b"",
    ) -> int:
        headers = self._expectation(expect, None) | _PURGE
        if marker_ttl_s is not None:
            headers[TTL] = ttl_header(marker_ttl_s)
        return await self.store(key, why, headers)

    async def store(
        self, key: str, value: bytes, headers: dict[str, str], *, message_id: str = ""
    ) -> int:
        check_written(key, value)
        headers = {**headers, MESSAGE_ID: message_id or random_token().hex()}
        sent = _Sent()
        try:
            answer = answer_of(await self._persist(key, value, headers, sent=sent))
        except QueuedError:
            entry = await self.get(key)
            return entry.revision if entry is not None else 0
        except ConflictError as conflict:
            # The server checks revisions before message ids. So a retried write can conflict with
            # its own first attempt, which has the same message id.
            if sent.before and (own := await self._own(key, headers[MESSAGE_ID], str(conflict))):
                return own
            raise
        try:
            return int(answer["seq"])
        except (KeyError, TypeError, ValueError):
            msg = f"{key}: the answer to the write cannot be read; repeat it with the same id"
            raise OutcomeUnknownError(msg) from None

    async def _own(self, key: str, message_id: str, conflict: str) -> int:
        """Return the sequence of the key's last message if it has this id; 0 if not.

        `conflict` is the leader's error, which names the last sequence. A node may read from a
        replica that lags behind the leader. So a node reads until the replica has this sequence.

        Raises:
            OutcomeUnknownError: the replica lags longer than CATCH_UP_S.
        """
        named = _LAST_SEQUENCE.search(conflict) if self._settings.node else None
        least = int(named[1]) if named is not None else 0
        async for _ in Attempts(CATCH_UP_S):
            last, stored = await self._last(key)
            if last is not None and stored.get(MESSAGE_ID) == message_id:
                return last.revision
            if (last.revision if last is not None else 0) >= least:
                return 0
        msg = f"{key}: the write may have had an effect, and a replica lags; read the key first"
        raise OutcomeUnknownError(msg)

    @staticmethod
    def _expectation(expect: int | None, expect_over: str | None) -> dict[str, str]:
        if expect is None:
            return {}
        headers = {EXPECT: str(expect)}
        if expect_over is not None:
            headers[EXPECT_OVER] = expect_over
        return headers

    async def get(self, key: str) -> Entry | None:
        entry, _ = await self._last(key)
        return entry

    async def _last(self, key: str) -> tuple[Entry | None, Mapping[str, str]]:
        if self._settings.node:
            return await self._last_direct(key)
        try:
            answer = await self.call(
                f"$JS.API.STREAM.MSG.GET.{stream_of(key)}", {"last_by_subj": key}
            )
        except ApiError as error:
            if error.code == NO_MESSAGE:
                return None, {}
            raise
        message = answer["message"]
        headers = _headers_of(message["hdrs"]) if message.get("hdrs") else {}
        body, at_ns = base64.b64decode(message.get("data", "")), time_ns(message.get("time", ""))
        return entry_of(message["subject"], headers, body, int(message["seq"]), at_ns), headers

    async def _last_direct(self, key: str) -> tuple[Entry | None, Mapping[str, str]]:
        """Read by DIRECT.GET. Its subject has the key, so permissions limit a node to its keys.

        Any replica in sync answers.
        """
        raw = await self._persist(f"$JS.API.DIRECT.GET.{stream_of(key)}.{key}", b"", {})
        if raw.status == "404":
            return None, {}
        headers = raw.headers
        sequence = headers.get(SEQUENCE, "0")
        if not sequence.isdecimal():
            msg = f"{key}: the answer to the read cannot be read; ask again"
            raise UnavailableError(msg)
        subject, at_ns = (
            headers.get("Nats-Subject", key),
            time_ns(headers.get("Nats-Time-Stamp", "")),
        )
        return entry_of(subject, headers, raw.body, int(sequence), at_ns), headers

    async def batch(self, writes: Sequence[Write]) -> int:
        """Store a batch (ADR-50). The last message commits the whole batch."""
        if not writes:
            msg = "an empty batch"
            raise ValueError(msg)
        for write in writes:
            check_written(write.key, write.value or b"")
        identity = random_token().hex()
        last = len(writes)
        raw = Raw("")
        for number, write in enumerate(writes, start=1):
            headers = self._expectation(write.expect, write.expect_over)
            headers |= {"Nats-Batch-Id": identity, "Nats-Batch-Sequence": str(number)}
            if write.value is None:
                headers |= _PURGE
            if write.ttl_s is not None:
                headers[TTL] = ttl_header(write.ttl_s)
            body = write.why if write.value is None else write.value
            if number < last:
                raw = await self._ask_once(write.key, body, headers)
                if raw.body:
                    answer_of(raw)
            else:
                headers["Nats-Batch-Commit"] = "1"
                raw = await self._ask_once(write.key, body, headers)
        return int(answer_of(raw)["seq"])

    async def _ask_once(self, subject: str, body: bytes, headers: dict[str, str]) -> Raw:
        """Send one message of a batch. A retry would break the batch's order."""
        try:
            await self._link.up(self._settings.write_timeout_s)
            return await self._link.ask(
                subject, body, headers=headers, timeout_s=self._settings.write_timeout_s
            )
        except (LinkLostError, TimeoutError) as error:
            if "Nats-Batch-Commit" in headers:
                msg = f"no answer to the end of the batch at {subject}; read the key first"
                raise OutcomeUnknownError(msg) from error
            msg = f"the batch was not accepted at {subject}"
            raise UnavailableError(msg) from error

    async def fill(self, bucket: str) -> float:
        info = await self.call(f"$JS.API.STREAM.INFO.KV_{bucket}")
        return fill_of(info)

    async def extent(self, subject_filter: str) -> Extent:
        return extent_of(await self.call(f"$JS.API.STREAM.INFO.{stream_of(subject_filter)}"))

    async def trim(self, subject_filter: str, *, keep: int = 0) -> None:
        body = {"filter": subject_filter} | ({"keep": keep} if keep else {})
        await self.call(f"$JS.API.STREAM.PURGE.{stream_of(subject_filter)}", body)

    async def report(self) -> list[StreamReport]:
        answer = await self.call("$JS.API.STREAM.LIST", {})
        return [await self._reported(info) for info in answer.get("streams") or []]

    async def _reported(self, info: dict[str, Any]) -> StreamReport:
        consumers = await self.call(f"$JS.API.CONSUMER.LIST.{info['config']['name']}", {})
        return report_of(info, consumers.get("consumers") or [])

    async def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> list[StoredMessage]:
        """Read stored messages by one DIRECT.GET batch (ADR-31). A status ends the batch."""
        found: list[StoredMessage] = []
        ended: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()

        def receive(raw: Raw) -> None:
            if raw.status:
                if not ended.done():
                    ended.set_result(raw)
            elif SEQUENCE in raw.headers:
                found.append(
                    StoredMessage(
                        raw.headers.get("Nats-Subject", ""),
                        raw.body,
                        int(raw.headers[SEQUENCE]),
                        time_ns(raw.headers.get("Nats-Time-Stamp", "")),
                    )
                )

        inbox = self._link.inbox()
        query = {
            "batch": limit,
            "max_bytes": HISTORY_BYTES,
            "next_by_subj": subject_filter,
            "seq": after + 1,
        }
        subscription = await self._link.open(inbox, receive)
        try:
            await self._link.send(
                f"$JS.API.DIRECT.GET.{stream_of(subject_filter)}",
                json.dumps(query).encode(),
                reply=inbox,
            )
            async with asyncio.timeout(self._settings.write_timeout_s):
                last = await ended
        except TimeoutError:
            msg = "the history was not answered in time"
            raise UnavailableError(msg) from None
        finally:
            await subscription.close()
        if last.status not in _ENDS_OF_HISTORY:
            msg = f"{subject_filter}: {why_again(last) or f'status {last.status}'}"
            raise UnavailableError(msg)
        return found
