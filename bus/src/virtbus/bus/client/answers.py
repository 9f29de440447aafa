"""Encodes and sends a service's answers to requests: data or errors (ADR-32)."""

import logging
from typing import Any

from virtbus.bus.client.link import Link, Raw
from virtbus.bus.client.message_format import CONTENT_TYPE, ERROR_CODE, ERROR_TEXT, JSON, MSGPACK
from virtbus.bus.client.ports import Rendered
from virtbus.bus.errors import (
    ConflictError,
    FullError,
    OutcomeUnknownError,
    OversizeError,
    UnavailableError,
)
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.wire import encode, encode_json, is_json

log = logging.getLogger(__name__)

HEADER_CHARS = 512


def render(value: Any, *, as_json: bool) -> bytes:
    """Return `value` as the body of a successful answer, without an envelope."""
    if isinstance(value, Rendered):
        return value
    return encode_json(value) if as_json else encode(value)


def render_error(error: VirtbusError, *, as_json: bool) -> tuple[bytes, dict[str, str]]:
    """Return the body and the ADR-32 headers of an answer that reports `error`."""
    body = {"error": error.body.model_dump(mode="json", exclude_none=True)}
    text = "".join(c if c.isprintable() else " " for c in str(error)[:HEADER_CHARS])
    headers = {ERROR_CODE: str(error.code), ERROR_TEXT: text}
    return render(body, as_json=as_json), headers


def refusal_of(error: Exception, subject: str) -> VirtbusError:
    """Translate a handler's exception into the error that the requester gets."""
    match error:
        case VirtbusError():
            return error
        case UnavailableError():
            return VirtbusError(
                Code.UNAVAILABLE,
                "bus_unavailable",
                "the bus did not take the write; try again",
                after_ms=500,
            )
        case FullError():
            return _no_room(error)
        case ConflictError():
            return VirtbusError(
                Code.CONFLICT,
                "changed_meanwhile",
                "the record changed meanwhile; read it again",
                retry=Retry.SAME_ID,
            )
        case OutcomeUnknownError() | TimeoutError():
            return VirtbusError(
                Code.UNAVAILABLE,
                "bus_outcome_unknown",
                "the outcome of the write is unknown; repeat the request with the same id",
                retry=Retry.SAME_ID,
                after_ms=500,
            )
        case _:
            log.error(
                "handler of %s failed", subject, exc_info=error, extra={"code": "handler_failed"}
            )
            return VirtbusError(Code.INTERNAL, "internal", "the service failed; its log says why")


def _no_room(error: FullError) -> VirtbusError:
    if isinstance(error, OversizeError):
        return VirtbusError(Code.TOO_LARGE, "too_large", f"{error}; nothing was stored")
    message = "the bus has no room for this; delete something first"
    return VirtbusError(Code.EXHAUSTED, "bus_full", message, after_ms=5000)


class Answers:
    """Sends the answers to one request, in the format (JSON or msgpack) of that request.

    `stream`, `last` and `refuse` raise VirtbusError 413 for an answer that is too large. Without a
    connection they raise UnavailableError.
    """

    def __init__(self, link: Link, raw: Raw) -> None:
        self._link = link
        self._reply = raw.reply
        self.as_json = is_json(raw.body) or raw.headers.get(CONTENT_TYPE, "").startswith(JSON)
        self.streamed = False

    async def stream(self, value: Any) -> None:
        self.streamed = True
        await self._send(render(value, as_json=self.as_json), {})

    async def last(self, value: Any) -> None:
        """Send the final answer. None is not sent after an answer of `stream`."""
        if value is not None or not self.streamed:
            await self._send(render(value, as_json=self.as_json), {})

    async def refuse(self, error: VirtbusError) -> None:
        body, headers = render_error(error, as_json=self.as_json)
        await self._send(body, headers)

    async def _send(self, body: bytes, headers: dict[str, str]) -> None:
        if not self._reply:
            return
        kind = JSON if self.as_json else MSGPACK
        try:
            await self._link.send(self._reply, body, headers={CONTENT_TYPE: kind, **headers})
        except FullError as error:
            raise VirtbusError(
                Code.TOO_LARGE, "answer_too_large", "the answer is too large; ask for less"
            ) from error
