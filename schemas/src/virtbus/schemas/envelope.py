"""The envelope of every message, with the attribute names of CloudEvents 1.0."""

from typing import Any

from pydantic import Field

from virtbus.schemas.model import LenientModel
from virtbus.schemas.wire import MAX_NODES, decode, validate


class Envelope(LenientModel):
    """The outer fields of a message. `timeout_ms` counts from receipt, on the receiver's clock."""

    id: str = Field("", max_length=128)
    source: str = Field("", max_length=256)
    type: str = Field("", max_length=128)
    subject: str = Field("", max_length=256)
    time: str = Field("", max_length=64)
    data: Any = None
    epoch: int | None = None
    generation: int | None = None
    timeout_ms: int | None = Field(None, ge=1, le=3_600_000)


def open_envelope(body: bytes, most_values: int = MAX_NODES) -> Envelope:
    """Return the envelope in `body`. A body that is not a map with `data` is the data itself.

    Raises:
        VirtbusError: an error of `wire.decode`, or 400 if an attribute has a wrong type or size.
    """
    value = decode(body, most_values=most_values) if body.strip() else {}
    if isinstance(value, dict) and "data" in value:
        return validate(Envelope, value)
    return Envelope(data=value)
