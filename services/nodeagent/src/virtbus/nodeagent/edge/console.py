"""Serial consoles: one reader a socket, takeover by the next, and the log that is kept.

The guest is hostile (CON-05): what a slow client does not read is dropped from the front of a
bounded buffer, and nothing it prints is ever interpreted here.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from virtbus.schemas.errors import Code, VirtbusError

BUFFER_BYTES = 1024 * 1024
CHUNK_BYTES = 64 * 1024
FOLLOW_INTERVAL_S = 0.2
MAX_LOG_TAIL_BYTES = 4 * 1024 * 1024


class Session:
    """One attachment. `output` ends when the guest stops, or another client takes over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.closed = ""
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        self._wake = asyncio.Event()

    async def pump(self) -> None:
        """Read the socket as fast as it comes; keeps the newest BUFFER_BYTES."""
        try:
            while data := await self._reader.read(CHUNK_BYTES):
                self._buffer += data
                del self._buffer[:-BUFFER_BYTES]
                self._wake.set()
        except ConnectionError:
            pass
        self.end("the guest stopped")

    def end(self, why: str) -> None:
        self.closed = self.closed or why
        self._wake.set()

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
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()


class Consoles:
    """The `Console` port over the sockets and logs that libvirt makes."""

    def __init__(self, socket: Callable[[str], Path], log: Callable[[str], Path]) -> None:
        self._socket = socket
        self._log = log
        self._sessions: dict[str, Session] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def attach(self, uid: str) -> AsyncIterator[Session]:
        """The serial port allows one connection, so a former session is ended first (CON-08)."""
        former = self._sessions.get(uid)
        if former is not None:
            former.end("taken over by another client")
        lock = self._locks.setdefault(uid, asyncio.Lock())
        async with lock:
            reader, writer = await self._connect(uid)
            session = Session(reader, writer)
            self._sessions[uid] = session
            try:
                async with asyncio.TaskGroup() as group:
                    pump = group.create_task(session.pump())
                    try:
                        yield session
                    finally:
                        pump.cancel()
            finally:
                del self._sessions[uid]
                writer.close()
        if not lock.locked():
            self._locks.pop(uid, None)

    async def _connect(self, uid: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(str(self._socket(uid)), limit=CHUNK_BYTES)
        except OSError:
            message = "the guest does not run, so it has no console; `virtbus vm start` starts it"
            raise VirtbusError(Code.CONFLICT, "no_console", message) from None

    async def read_log(self, uid: str, *, tail_bytes: int, follow: bool) -> AsyncIterator[bytes]:
        """The last `tail_bytes` of the log, then what is added; survives rotation and removal."""
        path = self._log(uid)
        position = max(_size(path) - min(tail_bytes, MAX_LOG_TAIL_BYTES), 0)
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
