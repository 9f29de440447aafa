"""Checks the addresses of servers behind a proxy, as far as this host can resolve them.

A proxy resolves names itself, and may get other answers. So this check refuses only forbidden
addresses, and names that this host resolves to a forbidden address. The rules of the proxy apply to
all other names.
"""

import asyncio
import socket
from collections.abc import Iterable

from virtbus.imaged.core.addresses import Network, refusal

LOOKUP_S = 2.0
"""Limit of a lookup in seconds: short, because a host behind a proxy often cannot resolve outside
names."""


async def refusal_by_proxy(host: str, allowed: Iterable[Network]) -> str:
    """Return the reason why no proxy may be asked for `host`; empty if there is no reason."""
    allowed = tuple(allowed)
    try:
        async with asyncio.timeout(LOOKUP_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, None, type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError, TimeoutError):
        return ""
    reasons = (refusal(str(address[0]), allowed) for *_, address in found)
    return next((why for why in reasons if why), "")
