"""Message bodies: JSON to the API, which then answers JSON with all defaults.

Msgpack for the rest.
"""

import json
from collections.abc import Mapping
from typing import Any

from virtbus.bus.client.message_format import frame_of

SOURCE = "virtbus-cli"


class UndecodableError(Exception):
    """A body that is neither JSON nor msgpack."""


def envelope(subject: str, message_id: str, timeout_ms: int | None, data: Any) -> dict[str, Any]:
    """Return `data` in an envelope of this command."""
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
    """Return the value of a body; None for an empty one.

    Raises:
        UndecodableError: neither JSON nor msgpack.
    """
    if not body:
        return None
    try:
        if body[:64].lstrip()[:1] in {b"{", b"[", b'"'} or body in {b"null", b"true", b"false"}:
            return json.loads(body)
        import msgpack  # only consoles, logs and events need it

        return msgpack.unpackb(body, strict_map_key=False)
    except Exception as error:
        # msgpack's own exceptions share no base below Exception with ValueError
        msg = "a message cannot be read; do the command and the services have one version?"
        raise UndecodableError(msg) from error


def data_of(body: bytes) -> Any:
    """Return the data of an envelope, or the whole value if there is no envelope."""
    value = read(body)
    if isinstance(value, Mapping) and "data" in value and ("id" in value or "type" in value):
        return value["data"]
    return value
