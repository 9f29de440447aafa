"""Carries messages between netd and the resolver: one line of JSON each."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from virtbus.netd.core.resolver_messages import Message

FIRST_CHANNEL = 3
"""The resolver's descriptor of its first connection to netd."""
LINE_BYTES = 4 * 1024 * 1024
"""Maximum length of a message in bytes. One message carries the uids of all VMs of a host."""


class ResolverChannel:
    """One connection. `send` never waits, and drops messages to a peer that has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message | None:
        """Return the next message; None after the peer's end or for a message over LINE_BYTES."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the connection once the sent messages are written."""
        self._writer.close()


async def channel_on(connection: socket.socket) -> ResolverChannel:
    """Return a channel that owns a connected socket."""
    connection.setblocking(False)
    return ResolverChannel(*await asyncio.open_unix_connection(sock=connection, limit=LINE_BYTES))


@asynccontextmanager
async def listening(
    path: Path, connected: Callable[[ResolverChannel], Awaitable[None]]
) -> AsyncIterator[None]:
    """Accept connections of root at `path`. Replace the socket of a killed process.

    Raises:
        OSError: the path cannot be used.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await connected(ResolverChannel(reader, writer))

    _make_way(path)
    listener = _bound(path)
    server = await asyncio.start_unix_server(accept, sock=listener, limit=LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        _remove(path)


def can_be_found(path: Path) -> bool:
    """Return False if the socket was removed from `path`."""
    return path.exists()


def _bound(path: Path) -> socket.socket:
    """Return a socket that only root can connect to. The umask is the process's, for a moment."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _make_way(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
