"""Who a connection is and whom it trusts, in the words of `nats.aio.Client.connect`.

`cryptography` and `ssl` are imported only where a bus has nkeys and TLS.
"""

import logging
from typing import Any

from virtbus.bus.access import BusSettings

# asyncio's word on nats-py's protocol under TLS, at each end of a connection: nothing to mend here
logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in str(record.msg))


def public_key(settings: BusSettings) -> str:
    """The public half of our nkey.

    Raises:
        ValueError: the seed is none.
    """
    from virtbus.bus import nkeys

    return nkeys.public(settings.nkey_seed)


def options(settings: BusSettings) -> dict[str, Any]:
    """What `Client.connect` takes of who we are and whom we trust."""
    found: dict[str, Any] = {}
    if settings.nkey_seed:
        from virtbus.bus import nkeys

        seed = settings.nkey_seed
        found["signature_cb"] = lambda nonce: nkeys.signed(seed, nonce).encode("ascii")
    elif settings.user:
        found |= {"user": settings.user, "password": settings.password or None}
    if settings.ca:
        import ssl

        found["tls"] = ssl.create_default_context(cadata=settings.ca)
        found["tls"].minimum_version = ssl.TLSVersion.TLSv1_2
    return found
