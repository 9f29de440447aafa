"""Limits of compare-and-set writes to the bucket `vm`, and the error after too many lost races."""

from virtbus.schemas.errors import Code, Retry, VirtbusError

ATTEMPTS = 8
"""Limit of attempts of one write. Each failed attempt lost a race to another writer."""
MARKER_TTL_S = 86_400.0
"""Time that a deleted uid is remembered. Meanwhile, neither a late create nor a restored backup can
bring the VM back (I3)."""


def contended(what: str) -> VirtbusError:
    """Return the error 503 after each attempt lost a race. The same request may be repeated."""
    message = f"{what} keeps changing; repeat the same request"
    return VirtbusError(Code.UNAVAILABLE, "contended", message, retry=Retry.SAME_ID, after_ms=200)
