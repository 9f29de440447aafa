"""Receives the READY=1 of one service (sd_notify(3)) over that service's own socket."""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ReadySocket:
    """An abstract unix datagram socket for one service's notifications.

    An abstract address is no path, so the limit of 108 bytes on a socket's path does not matter.
    """

    def __init__(self, name: str) -> None:
        self.address = f"@virtbus-up-{name}-{secrets.token_hex(8)}"
        self._ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait(self) -> None:
        await self._ready.wait()

    def forget(self) -> None:
        """Forget that the service was ready, because a new process starts."""
        self._ready.clear()

    @contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.bind("\0" + self.address[1:])
            loop.add_reader(sock, self._receive, sock)
            try:
                yield
            finally:
                loop.remove_reader(sock)

    def _receive(self, sock: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                if b"READY=1" in sock.recv(4096).split(b"\n"):
                    self._ready.set()
