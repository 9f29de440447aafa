"""A link between a node and its bus that can fail: a TCP proxy in user space.

This kernel has no netem. A proxy can reset and refuse connections, hang half-open (accepted,
never answered), delay, and corrupt bytes.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_CHUNK = 64 * 1024
ENDED_S = 5.0
"""Time for connections to end after their reset. The event loop reports each cancelled one."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: close sends RST and no FIN."""


class State(StrEnum):
    """The condition of the link."""

    WELL = "well"
    CUT = "cut"
    HALF_OPEN = "half-open"
    SLOW = "slow"
    GARBLED = "garbled"


@dataclass(frozen=True, slots=True)
class Slowness:
    """Delays of a slow link: of each chunk, and the chance and length of a retransmission."""

    delay_s: float = 0.25
    lost: float = 0.1
    retransmit_s: float = 1.0


class Link:
    """One listening port in front of one server; methods may be called from any thread."""

    def __init__(
        self, target: tuple[str, int], seed: int = 0, *, listen: str = "127.0.0.1"
    ) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._slowness = Slowness()
        self.state = State.WELL
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._moved = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = socket.create_server((listen, 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = self._call(asyncio.start_server(self._serve, sock=self._listener))

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def become(self, state: State) -> None:
        """Apply the condition from now on, to existing and new connections."""
        self._call(self._become(state))

    async def _become(self, state: State) -> None:
        self.state = state
        if state is State.CUT:
            for pair in tuple(self._pairs):
                self._reset(pair)
        self._moved.set()
        self._moved = asyncio.Event()

    def close(self) -> None:
        """End it and all connections through it."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        await self._become(State.CUT)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=ENDED_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- one connection -------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.state is State.CUT:
            self._reset((writer, writer))
            return
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            pair = (writer, far_writer)
            self._pairs.add(pair)
            try:
                with contextlib.closing(far_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pump(reader, far_writer))
                        group.create_task(self._pump(far_reader, writer))
            except* OSError:
                pass
            finally:
                self._pairs.discard(pair)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            chunk = await reader.read(_CHUNK)
            while self.state is State.HALF_OPEN:
                await self._moved.wait()
            if self.state is State.SLOW:
                slowness = self._slowness
                lost = self._random.random() < slowness.lost
                await asyncio.sleep(slowness.retransmit_s if lost else slowness.delay_s)
            if not chunk:
                raise ConnectionResetError
            if self.state is State.GARBLED:
                chunk = self._garbled(chunk)
            writer.write(chunk)
            await writer.drain()

    def _garbled(self, chunk: bytes) -> bytes:
        """Change one byte: a corruption that TCP's checksum occasionally misses."""
        at = self._random.randrange(len(chunk))
        return chunk[:at] + bytes([chunk[at] ^ 0x5A]) + chunk[at + 1 :]

    @staticmethod
    def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        for end in pair:
            with contextlib.suppress(OSError):
                sock = end.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.transport.abort()
