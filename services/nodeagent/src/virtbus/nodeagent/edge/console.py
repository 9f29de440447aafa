"""Serial consoles: one reader a socket, takeover by the next, and the log that is kept.

The guest is hostile (CON-05): what a slow client does not read is dropped from the front of a
bounded buffer, and nothing it prints is ever interpreted here.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from virtbus.schemas.errors import Code, VirtbusError

BUFFER_BYTES = 1024 * 1024
CHUNK_BYTES = 64 * 1024
FOLLOW_INTERVAL_S = 0.2
MAX_LOG_TAIL_BYTES = 4 * 1024 * 1024
STOPPED = "the guest stopped"
TAKEN_OVER = "taken over by another client"


class Session(asyncio.Protocol):
    """One attachment. `output` ends when the guest stops, or another client takes over.

    A protocol and not a stream: the socket is always read, so that a client that does not read
    never makes the guest wait for its own console.
    """

    def __init__(self) -> None:
        self.closed = ""
        self._buffer = bytearray()
        self._wake = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.WriteTransport | None = None

    # --- what asyncio tells -----------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep the newest BUFFER_BYTES."""
        self._buffer += data
        del self._buffer[:-BUFFER_BYTES]
        self._wake.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.end(STOPPED)

    # --- what the client does ---------------------------------------------------------------
    def end(self, why: str) -> None:
        """Let go of the console at once; the first reason given stands."""
        self.closed = self.closed or why
        self._wake.set()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    async def output(self) -> AsyncIterator[bytes]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._buffer:
                data = bytes(self._buffer[:CHUNK_BYTES])
                del self._buffer[: len(data)]
                yield data
            if self.closed:
                return

    async def write(self, data: bytes) -> None:
        """Waits while the guest takes no input; does nothing once the session has ended."""
        await self._writable.wait()
        if not self.closed and self._transport is not None:
            self._transport.write(data)


class Consoles:
    """The `Console` port over the sockets and logs that libvirt makes."""

    def __init__(self, socket: Callable[[str], Path], log: Callable[[str], Path]) -> None:
        self._socket = socket
        self._log = log
        self._sessions: dict[str, Session] = {}

    @asynccontextmanager
    async def attach(self, uid: str) -> AsyncIterator[Session]:
        """The serial port serves one connection, so a former session is ended first (CON-08)."""
        session = Session()
        former = self._sessions.get(uid)
        self._sessions[uid] = session
        if former is not None:
            former.end(TAKEN_OVER)
        try:
            await self._connect(uid, session)
            yield session
        finally:
            session.end("detached")
            if self._sessions.get(uid) is session:
                del self._sessions[uid]

    async def _connect(self, uid: str, session: Session) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: session, str(self._socket(uid)))
        except OSError:
            message = "the guest does not run, so it has no console; `virtbus vm start` starts it"
            raise VirtbusError(Code.CONFLICT, "no_console", message) from None
        if session.closed:  # taken over while it was connecting
            session.end(session.closed)

    async def read_log(self, uid: str, *, tail_bytes: int, follow: bool) -> AsyncIterator[bytes]:
        """The last `tail_bytes` of the log, then what is added; survives rotation and removal."""
        path = self._log(uid)
        tail_bytes = min(max(tail_bytes, 0), MAX_LOG_TAIL_BYTES)
        position = max(_size(path) - tail_bytes, 0)
        while True:
            data = await asyncio.to_thread(_read_at, path, position)
            if data:
                position += len(data)
                yield data
            elif not follow:
                return
            else:
                await asyncio.sleep(FOLLOW_INTERVAL_S)
                if _size(path) < position:
                    position = 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_at(path: Path, position: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, CHUNK_BYTES, position)
    finally:
        os.close(descriptor)
