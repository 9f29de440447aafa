"""Bounds of the connections of the HTTPS port: a share for each source, and time limits."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from virtbus.bus.client.accept_loop import accept
from virtbus.bus.client.fair_shares import FairShares

MOST = 1024
"""Maximum number of connections, each of some 60 KB. Each open console uses one connection."""
GREET_S = 10.0
"""Timeout of the TLS handshake."""
FIRST_S = 10.0
"""Timeout from the handshake to the first request."""
log = logging.getLogger(__name__)

Protocol = Callable[[], asyncio.BaseProtocol]


@dataclass(slots=True)
class _Open:
    source: str
    since_s: float
    asked: bool = False


class Connections:
    """Accepts TLS connections. `make` makes the protocol object of a connection."""

    def __init__(
        self, make: Protocol, context: ssl.SSLContext, *, most: int = MOST, first_s: float = FIRST_S
    ) -> None:
        self._make = make
        self._context = context
        self._shares = FairShares(most)
        self._first_s = first_s
        self._open: dict[asyncio.BaseTransport, _Open] = {}

    def asked(self, transport: asyncio.BaseTransport | None) -> None:
        """Note a request. From now on the connection may be idle without a time limit."""
        if transport is not None and (one := self._open.get(transport)) is not None:
            one.asked = True

    async def accept(self, listener: socket.socket) -> None:
        await accept(listener, self._shares, self._greeted, self._sweep)

    async def _greeted(self, connection: socket.socket, source: str) -> None:
        loop = asyncio.get_running_loop()
        made: Any = None
        try:
            made, _protocol = await loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=GREET_S
            )
        except OSError as error:  # includes errors of TLS and timeouts
            log.debug("no handshake with %s: %s", source, error)
        finally:
            if made is None:
                connection.close()
                self._shares.release(source)
            else:
                self._open[made] = _Open(source, loop.time())

    def _sweep(self) -> None:
        """Release the shares of closed connections, and abort connections without a first request.

        A connection has `first_s` seconds for its first request.
        """
        late_s = asyncio.get_running_loop().time() - self._first_s
        for transport, one in tuple(self._open.items()):
            if transport.is_closing():
                del self._open[transport]
                self._shares.release(one.source)
            elif (
                not one.asked and one.since_s < late_s and isinstance(transport, asyncio.Transport)
            ):
                transport.abort()
