"""Decides when the bridge's certificates are renewed.

The clients of the bridge are API servers, which get all valid authorities. A new authority signs
serving certificates only after a day, when every API server knows the authority. This wait is
skipped if the serving certificate is missing, unusable or nearly expired.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

AUTHORITY_LIFE, AUTHORITY_LEFT = timedelta(days=365), timedelta(days=120)
"""Lifetime of an authority, and the remaining time at which a new authority is made."""
SERVING_LIFE, SERVING_LEFT = timedelta(days=90), timedelta(days=30)
"""Lifetime of a serving certificate, and the remaining time at which it is renewed.
A serving certificate never outlives its authority (`life`).
"""
SETTLED = timedelta(days=1)
"""Time after which each API server knows a new authority, even if the server was unreachable."""
SKEW = timedelta(hours=1)
"""Certificates begin this much earlier, for API servers whose clocks are behind."""


class Life(NamedTuple):
    """The validity of a certificate."""

    begins: datetime
    ends: datetime


class Due(NamedTuple):
    """The certificates to make.

    If both are due, the new authority signs the serving certificate.
    """

    authority: bool
    serving: bool


def due(authorities: tuple[Life, ...], serving: Life | None, now: datetime) -> Due:
    """Return the certificates to make now. `authorities` has the newest first.

    `serving` is None if the certificate is missing, lacks a DNS name, or was signed by none of the
    authorities.
    """
    newest = authorities[0] if authorities else None
    if newest is None or newest.ends <= now:
        return Due(authority=True, serving=True)
    authority = newest.ends - now < AUTHORITY_LEFT
    if serving is None or serving.ends <= now:
        return Due(authority, serving=True)
    settled = not authority and now - newest.begins >= SKEW + SETTLED
    wanted = serving.ends - now < SERVING_LEFT
    return Due(authority, serving=wanted and (settled or serving.ends - now < SETTLED))


def life(now: datetime, lasts: timedelta, within: Life | None = None) -> Life:
    """Return the validity of a new certificate, which ends at the latest with its authority."""
    ends = now + lasts
    return Life(now - SKEW, min(ends, within.ends) if within else ends)
