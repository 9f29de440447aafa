"""The envelope of every message: CloudEvents 1.0 attribute names (design §3 "Messages")."""

from typing import Any

from pydantic import Field

from virtbus.schemas.model import Fact
from virtbus.schemas.wire import decode, validate


class Envelope(Fact):
    """`timeout_ms` counts on the receiver's monotonic clock from receipt (rule 6)."""

    id: str = Field("", max_length=128)
    source: str = Field("", max_length=256)
    type: str = Field("", max_length=128)
    subject: str = Field("", max_length=256)
    time: str = Field("", max_length=64)
    data: Any = None
    epoch: int | None = None
    generation: int | None = None
    timeout_ms: int | None = Field(None, ge=1, le=3_600_000)


def open_envelope(body: bytes) -> Envelope:
    """The envelope in `body`; a body that is no map with `data` is the data itself.

    Raises:
        VirtbusError: as `decode`; 400 when the attributes are not CloudEvents'.
    """
    value = decode(body) if body.strip() else {}
    if isinstance(value, dict) and "data" in value:
        return validate(Envelope, value)
    return Envelope(data=value)
