"""Accepts connections to a listening socket, and limits the connections of each source address."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from virtbus.bus.client.fair_shares import FairShares
from virtbus.bus.runtime.tasks import background

log = logging.getLogger(__name__)

PAUSE_S = 0.1
"""Pause after a failed accept, for example while the process has no free file descriptor."""
Serve = Callable[[socket.socket, str], Coroutine[Any, Any, None]]
"""Serves a connection from a source address, closes it, and releases its unit of the shares."""


async def accept(
    listener: socket.socket,
    shares: FairShares,
    serve: Serve,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Accept connections until cancelled. Each connection takes a unit of `shares` or is closed."""
    async with background() as tasks:
        while True:
            connection, address = await accepted(listener)
            before()
            if shares.take(source := str(address[0])):
                tasks.start(serve(connection, source))
            else:
                connection.close()


async def accepted(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Return the next connection and its address."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.sock_accept(listener)
        except OSError as error:
            log.warning("cannot accept: %s", error, extra={"code": "accept_failed"})
            await asyncio.sleep(PAUSE_S)
