"""Encodes and decodes message bodies.

Requests are JSON, so the services answer in JSON, with all default values. Consoles, logs and
events use msgpack.
"""

import json
from collections.abc import Mapping
from typing import Any

from virtbus.bus.client.message_format import frame_of

SOURCE = "virtbus-cli"


class UndecodableError(Exception):
    """A body that is neither JSON nor msgpack."""


def envelope(subject: str, message_id: str, timeout_ms: int | None, data: Any) -> dict[str, Any]:
    """Return the envelope of a message on `subject` with `data`, as a map."""
    return frame_of(subject, data, message_id=message_id, source=SOURCE, timeout_ms=timeout_ms)


def to_json(value: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def to_msgpack(value: Any) -> bytes:
    """Return msgpack, which can contain bytes."""
    import msgpack  # only consoles, logs and events need it

    packed: bytes = msgpack.packb(value)
    return packed


def read(body: bytes) -> Any:
    """Return the decoded value of a body; None if the body is empty.

    Raises:
        UndecodableError: the body is neither JSON nor msgpack.
    """
    if not body:
        return None
    try:
        if body[:64].lstrip()[:1] in {b"{", b"[", b'"'} or body in {b"null", b"true", b"false"}:
            return json.loads(body)
        import msgpack  # only consoles, logs and events need it

        return msgpack.unpackb(body, strict_map_key=False)
    except Exception as error:
        # the only common base of msgpack's exceptions and ValueError is Exception
        msg = "a message cannot be read; do the command and the services have one version?"
        raise UndecodableError(msg) from error


def data_of(body: bytes) -> Any:
    """Return the `data` of the envelope in a body; without an envelope, the whole value."""
    value = read(body)
    if isinstance(value, Mapping) and "data" in value and ("id" in value or "type" in value):
        return value["data"]
    return value
