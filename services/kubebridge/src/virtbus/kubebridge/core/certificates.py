"""Decides when the bridge's certificates are renewed.

One authority signs one certificate at a time. API servers get all valid authorities long before a
new one signs the served certificate, so no client meets an unknown authority.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

AUTHORITY_LIFE, AUTHORITY_LEFT = timedelta(days=365), timedelta(days=120)
"""How long an authority lasts; with less than that left there is another one."""
SERVING_LIFE, SERVING_LEFT = timedelta(days=90), timedelta(days=30)
"""The same of what is served. It ends before its authority does."""
SETTLED = timedelta(days=1)
"""After that long everyone was told of an authority, whoever was away meanwhile."""
SKEW = timedelta(hours=1)
"""Certificates begin this much earlier, for servers whose clocks are behind."""


class Life(NamedTuple):
    """From when to when a certificate holds."""

    begins: datetime
    ends: datetime


class Due(NamedTuple):
    """What is to be made. `authority` is made first, and signs from then on."""

    authority: bool
    serving: bool


def due(authorities: tuple[Life, ...], serving: Life | None, now: datetime) -> Due:
    """What to make now, of what is kept: authorities, the newest first, and what is served.

    `serving` is None where it is missing, or is not what one of the authorities signed for our
    names.
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
    """Of a certificate that is made now; not beyond its authority's."""
    ends = now + lasts
    return Life(now - SKEW, min(ends, within.ends) if within else ends)
