"""Serves the serial consoles of VMs, and the consoles' stored logs.

All viewers of a console share one connection to the VM's serial port. The guest counts as hostile
(CON-05): this module never interprets its output, and always reads its port. The memory per console
has a limit for any number of viewers at any speed.
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
"""The number of bytes at the log's end that the first viewer of a console gets."""
FOLLOW_INTERVAL_S = 0.2
MAX_LOG_TAIL_BYTES = 4 * 1024 * 1024
STOPPED = "the guest stopped"
FELL_BEHIND = "the guest wrote faster than this client read; attach again"
NOW_WRITES = "you write now"
NOW_READS = "{} writes now; you can only read"


class Viewer:
    """A viewer with its own pace. `closed` is the reason of the end of `output`."""

    def __init__(self, port: "ConsolePort", owner: str) -> None:
        self.closed = ""
        self.owner = owner or "another client"
        self._port = port
        self._position = 0
        self._notes: list[str] = []
        self.wake = asyncio.Event()
        """Set when the viewer may have more to read."""

    def begin(self, tail_bytes: int, live: int) -> None:
        self._position = max(self._port.kept.start, live - tail_bytes)
        self.wake.set()

    def tell(self, note: str) -> None:
        self._notes.append(note)
        del self._notes[:-1]  # only the newest note is true
        self.wake.set()

    def end(self, why: str) -> None:
        self.closed = self.closed or why
        self.wake.set()

    async def output(self) -> AsyncIterator[bytes | str]:
        while True:
            await self.wake.wait()
            self.wake.clear()
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
        await self._port.write(self, data)


class ConsolePort(asyncio.Protocol):
    """The connection to one VM's serial port. The port accepts a single client (CON-08).

    An asyncio stream would stop reading when its buffer is full. This protocol always reads the
    socket, so that no viewer delays the guest.
    """

    def __init__(self) -> None:
        self.closed = ""
        self.kept = Scrollback()
        self.viewers: list[Viewer] = []
        self.writers: list[Viewer] = []
        """Viewers with write access, in order of arrival. The last viewer has the input."""
        self.connecting = asyncio.Lock()
        self._live = -1
        """The position of the first live byte; -1 until `join` has read the log."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.WriteTransport | None = None

    # --- callbacks of asyncio ------------------------------------------------------------------
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

    # --- calls by viewers ----------------------------------------------------------------------
    async def join(self, path: Path, log: Callable[[], bytes]) -> int:
        """Connect if needed. Return the position of the viewer's first live byte.

        `log` returns the end of the stored log.

        Raises:
            OSError: nothing listens on `path`.
        """
        async with self.connecting:
            if self._live >= 0:
                return self.kept.end
            if self._transport is None:
                await asyncio.get_running_loop().create_unix_connection(lambda: self, str(path))
            before = await asyncio.to_thread(log)
            for _ in range(2):
                await asyncio.sleep(0)  # receive the log's bytes: QEMU writes to the socket first
            self._live = self.kept.begin(before)
            return self._live

    def enter(self, viewer: Viewer, *, write: bool) -> None:
        self.viewers.append(viewer)
        if write:
            for former in self.writers[-1:]:
                former.tell(NOW_READS.format(viewer.owner))
            self.writers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer. If the viewer had the input, the previous writer gets the input.

        The last viewer closes the connection.
        """
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
        # Another viewer may have the input now.
        if self._writes(viewer) and not self.closed and self._transport is not None:
            self._transport.write(data)

    def _writes(self, viewer: Viewer) -> bool:
        return self.writers[-1:] == [viewer]

    def close(self, why: str) -> None:
        self.closed = self.closed or why
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        for viewer in self.viewers:
            viewer.wake.set()


class Consoles:
    """Implements the `Console` port with libvirt's sockets and logs."""

    def __init__(self, socket: Callable[[str], Path], log: Callable[[str], Path]) -> None:
        self._socket = socket
        self._log = log
        self._ports: dict[str, ConsolePort] = {}

    @asynccontextmanager
    async def attach(
        self, uid: str, *, write: bool = True, tail_bytes: int = 0, owner: str = ""
    ) -> AsyncIterator[Viewer]:
        """Attach a viewer. Its output begins with up to `tail_bytes` of earlier output.

        Raises:
            VirtbusError: 409 `no_console`: no guest runs.
        """
        port = self._ports.get(uid)
        if port is None or port.closed:
            port = self._ports[uid] = ConsolePort()
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

    async def _join(self, uid: str, port: ConsolePort) -> int:
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
        """Return the last `tail_bytes` of the log, at most 4 MiB, and then new output if `follow`.

        With `follow`, a rotation or removal of the log does not end the output.
        """
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
