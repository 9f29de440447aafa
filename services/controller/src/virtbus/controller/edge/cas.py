"""Limits of compare-and-set writes to the bucket `vm`, and the refusal after lost races."""

from virtbus.schemas.errors import Code, Retry, VirtbusError

ATTEMPTS = 8
"""Limit of attempts of one write. In each lost race another writer won; eight in a row are
contention."""
MARKER_TTL_S = 86_400.0
"""Time that a deleted uid is remembered, so that neither a late create nor a restored backup brings
it back (I3)."""


def contended(what: str) -> VirtbusError:
    """Return 503: each attempt lost a race. A repeat of the same request is safe."""
    message = f"{what} keeps changing; repeat the same request"
    return VirtbusError(Code.UNAVAILABLE, "contended", message, retry=Retry.SAME_ID, after_ms=200)
