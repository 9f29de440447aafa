"""Checks the size of every value before it is stored (ADR 0027)."""

import logging
from collections.abc import Callable
from typing import Any

from virtbus.bus.errors import OversizeError
from virtbus.schemas.bounds import LEAST_WRITTEN_BYTES, bound_of

log = logging.getLogger(__name__)


def check_written(key: str, value: bytes) -> None:
    """Raise OversizeError if a value exceeds the limit for keys of this kind."""
    if len(value) <= LEAST_WRITTEN_BYTES:
        return
    bound = bound_of(key)
    if len(value) > bound.written_bytes:
        msg = f"a {bound.kind} of {len(value)} bytes; at most {bound.written_bytes} are stored"
        raise OversizeError(msg)


def fact_body(subject: str, value: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Return an encoded event. An event that is too large is encoded in a smaller form."""
    body = encode(value)
    if len(body) <= LEAST_WRITTEN_BYTES or len(body) <= (most := bound_of(subject).written_bytes):
        return body
    from virtbus.schemas.fitting import smaller_forms

    size = len(body)
    for smaller in smaller_forms(value):
        body = encode(smaller)
        if len(body) <= most:
            break
    extra = {"code": "fact_cut"}
    log.warning("%s: an event of %d bytes was cut to %d", subject, size, len(body), extra=extra)
    return body
