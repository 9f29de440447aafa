"""Buffers the bytes of one stream of a client until a session reads them.

While a pipe is full, its connection reads nothing from the client, so the client must wait for the
session. A pipe holds at most FULL_BYTES and one more message of the client.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

FULL_BYTES = 64 * 1024
Send = Callable[[bytes, bool], Awaitable[None]]
"""Sends bytes to the client, and waits while the client is slow. The second argument is True for
the last bytes."""


class Pipe:
    """One stream between a client and a session. One task may read, and one task may write."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.left = False
        """True if the client has left, or has aborted the stream. Bytes to the client are lost."""
        self._send = send
        self._came = bytearray()
        self._no_more = False
        self._finished = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end of the stream."""
        while not self._came and not self._no_more:
            self._wake.clear()
            await self._wake.wait()
        data = bytes(self._came)
        self._came.clear()
        self._room.set()
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the client.

        Raises OSError if the client left.
        """
        if not self._finished:
            await self._send(data, False)

    async def finish(self) -> None:
        """Send the end of the stream. Further calls have no effect."""
        if not self._finished:
            self._finished = True
            await self._send(b"", True)

    async def feed(self, data: bytes, *, ended: bool) -> None:
        """Take bytes of the client, and wait while the pipe is full."""
        if not self._no_more:
            self._came += data
            self._no_more = ended
            self._wake.set()
        if len(self._came) >= FULL_BYTES:
            self._room.clear()
            await self._room.wait()

    def leave(self) -> None:
        """Note that the client has left, or has aborted the stream.

        A session can still read the bytes that the client sent before.
        """
        self.left = self._no_more = True
        self._wake.set()
        self._room.set()
