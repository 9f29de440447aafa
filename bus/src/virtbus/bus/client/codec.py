"""Encodes envelopes and decodes answers.

Only answers to the client's own requests are decoded here. `virtbus.schemas` decodes all other
received bytes (`open_envelope`, `wire.decode`).
"""

import json
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel

from virtbus.bus.client.message_format import JSON, frame_of
from virtbus.bus.client.ports import Message
from virtbus.bus.errors import BusError
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.wire import validate

Model = TypeVar("Model", bound=BaseModel)


def _plain(value: Any) -> Any:
    """Convert a pydantic model into a dict. msgpack calls this for types unknown to msgpack."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_defaults=True, by_alias=True)
    msg = f"a {type(value).__name__} cannot be sent"
    raise TypeError(msg)


def pack(value: Any) -> bytes:
    """Return plain values and models as msgpack. Lone surrogates in text become "?"."""
    packed: bytes = msgpack.packb(value, default=_plain, unicode_errors="replace")
    return packed


def unpack_answer(body: bytes, content_type: str) -> Any:
    """Return the value of an answer's body; None for an empty body.

    Raises:
        BusError: the body does not match its Content-Type.
    """
    if not body:
        return None
    try:
        if content_type == JSON:
            return json.loads(body)
        return msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        msg = "the answer cannot be read; do client and service have the same version?"
        raise BusError(msg) from error


def envelope(
    subject: str,
    value: Any,
    *,
    message_id: str,
    source: str,
    timeout_ms: int | None = None,
    at_ns: int = 0,
) -> bytes:
    """Return `value` in an envelope with CloudEvents names, as msgpack.

    A request needs `timeout_ms`. Any other message needs `at_ns`, its Unix time in nanoseconds.
    """
    frame = frame_of(subject, value, message_id=message_id, source=source, timeout_ms=timeout_ms)
    if timeout_ms is None:
        frame["time"] = datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    return pack(frame)


def read_message(model: type[Model], message: Message) -> Model:
    """Return the validated data of a core message or stored event.

    Raises:
        VirtbusError: 400 if the message is invalid, 413 if it is too large.
    """
    return validate(model, open_envelope(message.body).data)
