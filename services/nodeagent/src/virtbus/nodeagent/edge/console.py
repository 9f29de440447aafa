"""Serial consoles: one connection to the port for all who look on, and the log that is kept.

The guest is hostile (CON-05): what it prints is never interpreted here, its port is always read,
and what is kept of it is bounded, however many viewers there are and however slow they read.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from virtbus.nodeagent.core.scrollback import Scrollback
from virtbus.schemas.errors import Code, VirtbusError

CHUNK_BYTES = 32 * 1024
HISTORY_BYTES = 1024 * 1024
"""How much of the log the first viewer of a console finds."""
FOLLOW_INTERVAL_S = 0.2
MAX_LOG_TAIL_BYTES = 4 * 1024 * 1024
STOPPED = "the guest stopped"
FELL_BEHIND = "the guest wrote faster than this client read; attach again"
NOW_WRITES = "you write now"
NOW_READS = "{} writes now; you read on"


class Viewer:
    """One who looks on, at a pace of its own. `closed` is why `output` ended."""

    def __init__(self, port: "Port", owner: str) -> None:
        self.closed = ""
        self.owner = owner or "another client"
        self._port = port
        self._position = 0
        self._notes: list[str] = []
        self._wake = asyncio.Event()

    def begin(self, tail_bytes: int, live: int) -> None:
        """Look on from `tail_bytes` before the position `live`."""
        self._position = max(self._port.kept.start, live - tail_bytes)
        self._wake.set()

    def tell(self, note: str) -> None:
        """Say something to who looks on, between what the guest writes."""
        self._notes.append(note)
        del self._notes[:-1]  # only the last is true
        self._wake.set()

    def wake(self) -> None:
        """There may be more to read."""
        self._wake.set()

    def end(self, why: str) -> None:
        """Look on no more; the first reason given stands."""
        self.closed = self.closed or why
        self._wake.set()

    async def output(self) -> AsyncIterator[bytes | str]:
        """What the guest writes, as bytes; and as text what is to be said of the session."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._notes:
                yield self._notes.pop()
            while data := self._port.kept.read(self._position, CHUNK_BYTES):
                self._position += len(data)
                yield data
            if data is None:
                self.end(FELL_BEHIND)
            if self.closed or self._port.closed:
                self.end(self._port.closed)
                return

    async def write(self, data: bytes) -> None:
        """Type into the guest; waits while it takes nothing. Dropped where another one writes."""
        await self._port.write(self, data)


class Port(asyncio.Protocol):
    """The connection to one VM's serial port, which serves one (CON-08).

    A protocol and not a stream: the socket is always read, so that no viewer ever makes the guest
    wait for its own console.
    """

    def __init__(self) -> None:
        self.closed = ""
        self.kept = Scrollback()
        self.viewers: list[Viewer] = []
        self.writers: list[Viewer] = []
        """Those who would write, in the order they came; the last one does."""
        self.connecting = asyncio.Lock()
        self._live = -1
        """Where it was connected; -1: it is not yet."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.WriteTransport | None = None

    # --- what asyncio tells -----------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self.kept.add(data)
        if self._live >= 0:
            self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.close(STOPPED)

    # --- what viewers do --------------------------------------------------------------------
    async def join(self, path: Path, log: Callable[[], bytes]) -> int:
        """Connect where that was not done; the position at which `log` ends and live begins.

        Raises:
            OSError: nobody listens there.
        """
        async with self.connecting:
            if self._live >= 0:
                return self.kept.end
            if self._transport is None:
                await asyncio.get_running_loop().create_unix_connection(lambda: self, str(path))
            before = await asyncio.to_thread(log)
            for _ in range(2):
                await asyncio.sleep(0)  # QEMU wrote to us before it wrote to the log: read it
            self._live = self.kept.begin(before)
            return self._live

    def enter(self, viewer: Viewer, *, write: bool) -> None:
        """Let `viewer` look on, and write from now on."""
        self.viewers.append(viewer)
        if write:
            for former in self.writers[-1:]:
                former.tell(NOW_READS.format(viewer.owner))
            self.writers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Let go of `viewer`; who wrote before writes again."""
        self.viewers.remove(viewer)
        wrote = self.writers[-1:] == [viewer]
        if viewer in self.writers:
            self.writers.remove(viewer)
        if wrote and self.writers:
            self.writers[-1].tell(NOW_WRITES)
        if not self.viewers:
            self.close("detached")

    async def write(self, viewer: Viewer, data: bytes) -> None:
        if self._writes(viewer):
            await self._writable.wait()
        # Another one may have come to write meanwhile.
        if self._writes(viewer) and not self.closed and self._transport is not None:
            self._transport.write(data)

    def _writes(self, viewer: Viewer) -> bool:
        return self.writers[-1:] == [viewer]

    def close(self, why: str) -> None:
        """Let go of the port at once; the first reason given stands."""
        self.closed = self.closed or why
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        for viewer in self.viewers:
            viewer.wake()


class Consoles:
    """The `Console` port over the sockets and logs that libvirt makes."""

    def __init__(self, socket: Callable[[str], Path], log: Callable[[str], Path]) -> None:
        self._socket = socket
        self._log = log
        self._ports: dict[str, Port] = {}

    @asynccontextmanager
    async def attach(
        self, uid: str, *, write: bool = True, tail_bytes: int = 0, owner: str = ""
    ) -> AsyncIterator[Viewer]:
        """Look on; `tail_bytes` of what was written before come first, as far as they are kept."""
        port = self._ports.get(uid)
        if port is None or port.closed:
            port = self._ports[uid] = Port()
        viewer = Viewer(port, owner)
        port.enter(viewer, write=write)
        try:
            viewer.begin(tail_bytes, await self._join(uid, port))
            yield viewer
        finally:
            viewer.end("detached")
            port.leave(viewer)
            if port.closed and self._ports.get(uid) is port:
                del self._ports[uid]

    async def _join(self, uid: str, port: Port) -> int:
        path = self._log(uid)
        try:
            return await port.join(
                self._socket(uid),
                lambda: _read_at(path, max(_size(path) - HISTORY_BYTES, 0), HISTORY_BYTES),
            )
        except OSError:
            message = "the guest does not run, so it has no console; `virtbus vm start` starts it"
            raise VirtbusError(Code.CONFLICT, "no_console", message) from None

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


def _read_at(path: Path, position: int, most: int = CHUNK_BYTES) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, most, position)
    finally:
        os.close(descriptor)
