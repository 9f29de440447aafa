"""Builds the arguments of nats-py's `Client.connect`: login, trusted CA and time limits.

`nkeys` and `ssl` load slowly, so they are imported only if the login needs them.
"""

import logging
import secrets
from typing import Any

from virtbus.bus.runtime.bus_settings import BusSettings

# asyncio logs a harmless warning about eof_received at the end of each TLS connection of nats-py.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in str(record.msg))

PING_INTERVAL_S = 10
MAX_OUTSTANDING_PINGS = 2
ONE_OF_MANY_S = 0.8
"""Connect timeout of each of several servers. It leaves time to try all servers."""


def public_key(settings: BusSettings) -> str:
    """Return the public key of the nkey in `settings`.

    Raises:
        ValueError: the seed is invalid.
    """
    from virtbus.bus.client import nkeys

    return nkeys.public(settings.nkey_seed)


def options(settings: BusSettings) -> dict[str, Any]:
    """Return the arguments for login and TLS."""
    found: dict[str, Any] = {}
    if settings.nkey_seed:
        from virtbus.bus.client import nkeys

        seed = settings.nkey_seed
        found["signature_cb"] = lambda nonce: nkeys.signed(seed, nonce).encode("ascii")
    elif settings.user:
        found |= {"user": settings.user, "password": settings.password or None}
    if settings.ca:
        import ssl

        found["tls"] = ssl.create_default_context(cadata=settings.ca)
        found["tls"].minimum_version = ssl.TLSVersion.TLSv1_2
    return found


def patience(settings: BusSettings) -> dict[str, Any]:
    """Return the arguments for time limits and retries.

    nats-py retries the first connect. It does not reconnect: the module `connection` makes a new
    client instead.
    """
    return {
        "allow_reconnect": False,
        "reconnect_time_wait": 0.1 + secrets.randbelow(100) / 1000,
        "max_reconnect_attempts": -1,
        "connect_timeout": 2 if len(settings.servers) == 1 else ONE_OF_MANY_S,
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": MAX_OUTSTANDING_PINGS,
        "pending_size": 0,
        "drain_timeout": 2,
    }
