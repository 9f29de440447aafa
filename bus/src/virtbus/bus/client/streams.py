"""Carries byte streams over the bus with flow control: console, display, port (ADR 0023).

A client opens a stream with `opening`, a service answers with `accepting`. Both get a `ByteStream`.
Each end buffers at most its window of unread bytes, so a slow reader delays only its own stream. A
lost message, for example at a reconnect, ends the stream, because its bytes must not have a gap. A
stream of datagrams continues.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from virtbus.bus.client.flow_control import (
    CHUNK_BYTES,
    KEEP_ALIVE_S,
    SILENT_S,
    WINDOW_BYTES,
    BrokenStreamError,
    FlowControl,
)
from virtbus.bus.client.ports import Bus, Message, Request
from virtbus.bus.errors import BusError, UnavailableError
from virtbus.bus.runtime.tasks import background, wait_for_event
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.streams import StreamData, StreamOpen
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

INPUT_WINDOW_BYTES = 64 * 1024
"""A service's window of unread bytes per client: small, because a service has many clients."""
MAX_DATAGRAMS = 256
DETACHED = "detached"
LEFT = "the service ended the stream; open it again"
SILENT = "the other end went silent"
_FIRST_ANSWER_S = 10.0


class StreamEndedError(BusError):
    """The stream has ended, for the reason in the text."""


class ByteStream:
    """One end of a stream. `closed` is the reason of its end; empty while the stream is open.

    At a time, one task may read and one task may write.
    """

    def __init__(
        self,
        tell: Callable[[StreamData], Awaitable[None]],
        flow: FlowControl,
        *,
        datagrams: bool = False,
    ) -> None:
        self.closed = ""
        self.noted: Callable[[str], None] = lambda _text: None
        """Gets each text that the other end sends by `note`."""
        self._tell = tell
        self._flow = flow
        self._datagrams = datagrams
        self._came: deque[bytearray] = deque()
        self._no_more = False
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._over = asyncio.Event()

    # --- for the stream's user ----------------------------------------------------------------
    async def read(self) -> bytes:
        """Return the next bytes, or one datagram; empty at the end."""
        while not self._came:
            if self.closed:
                self._over.set()
            if self._no_more or self.closed:
                return b""
            self._readable.clear()
            await self._readable.wait()
        data = bytes(self._came.popleft())
        if self._flow.took(len(data)) and not self.closed:
            with suppress(StreamEndedError):
                await self._say(StreamData(upto=self._flow.upto))
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`, as the other end's window allows.

        Raises:
            StreamEndedError: the stream has ended.
        """
        left = memoryview(data)  # slicing bytes would copy the rest for each piece
        while left:
            while (room := self._flow.room) <= 0 and not self.closed:
                self._writable.clear()
                await self._writable.wait()
            self._still_open()
            piece, left = bytes(left[:room]), left[room:]
            await self._say(StreamData(data=piece, at=self._flow.sending(len(piece))))

    async def write_datagram(self, data: bytes) -> None:
        """Send `data` in one piece, or drop it if the window is too small. Raises as `write`."""
        self._still_open()
        if data and len(data) <= self._flow.room_whole:
            await self._say(StreamData(data=data, at=self._flow.sending(len(data))))

    async def finish(self) -> None:
        """Announce the end of writing; reading continues."""
        if not self.closed:
            await self._say(StreamData(eof=True))

    async def note(self, text: str) -> None:
        """Send a text for the person at the other end."""
        if not self.closed:
            await self._say(StreamData(note=text))

    def end(self, why: str) -> None:
        """End the stream now and drop unread bytes. The context's exit notifies the other end."""
        self.closed = self.closed or why
        self._came.clear()
        self._over.set()
        self._wake()

    async def while_open(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run `work` concurrently until all coroutines are done or the stream has ended.

        After the other end closes, the unread bytes can still be read. The end of the stream and a
        broken local connection (OSError) raise nothing.
        """
        async with background() as tasks:
            running = {tasks.start(self._guarded(one)) for one in work}
            over = tasks.start(self._until_over())
            while running and not over.done():
                await asyncio.wait({*running, over}, return_when=asyncio.FIRST_COMPLETED)
                running = {task for task in running if not task.done()}

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StreamEndedError:
            pass
        except OSError as error:
            self.end(f"the connection broke: {error.strerror or error}")

    async def _until_over(self) -> None:
        await self._over.wait()

    async def _say(self, piece: StreamData) -> None:
        try:
            await self._tell(piece)
        except BusError as error:
            self.end(str(error))
            raise StreamEndedError(self.closed) from error

    def _still_open(self) -> None:
        if self.closed:
            raise StreamEndedError(self.closed)

    # --- for the receiver of the other end's messages -------------------------------------------
    def heard(self, piece: StreamData) -> None:
        if self.closed:
            return
        try:
            self._flow.came(piece.at, len(piece.data), may_miss=self._datagrams)
        except BrokenStreamError as error:
            self.end(str(error))
            return
        self._flow.limited(piece.upto)
        if piece.data:
            self._keep(piece.data)
        if piece.note:
            self.noted(piece.note)
        self._no_more = self._no_more or piece.eof
        self.closed = piece.closed
        if self.closed and not self._came:
            self._over.set()
        self._wake()

    def _keep(self, data: bytes) -> None:
        """Buffer bytes. Join small pieces to save memory. Keep only the newest MAX_DATAGRAMS."""
        if self._datagrams:
            self._came.append(bytearray(data))
            if len(self._came) > MAX_DATAGRAMS:
                self._flow.took(len(self._came.popleft()))
        elif self._came and len(self._came[-1]) < CHUNK_BYTES:
            self._came[-1] += data
        else:
            self._came.append(bytearray(data))

    async def send_keep_alives(self) -> None:
        with suppress(StreamEndedError):
            while not await wait_for_event(self._over, KEEP_ALIVE_S):
                self._still_open()
                await self._say(StreamData(upto=self._flow.upto))

    def _wake(self) -> None:
        self._readable.set()
        self._writable.set()


async def carry(
    stream: ByteStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Copy bytes between a stream and a local connection, in both directions.

    Return when both directions have ended or one has failed. `stream` and `writer` stay open.
    """

    async def out() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        if not stream.closed and writer.can_write_eof():
            writer.write_eof()

    async def back() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await stream.write(data)
        await stream.finish()

    await stream.while_open(out(), back())


@asynccontextmanager
async def accepting(
    bus: Bus, request: Request, want: StreamOpen, *, datagrams: bool = False
) -> AsyncIterator[ByteStream]:
    """Open the service's end of the stream in `request`. The context's exit closes the stream.

    The client sends its bytes to a random subject, which only this client learns.
    """
    subject = f"{request.subject}.{bus.sources.uuid7()}"
    flow = FlowControl(INPUT_WINDOW_BYTES)
    flow.limited(want.window)
    stream = ByteStream(request.stream, flow, datagrams=datagrams)
    async with bus.subscribe(subject) as messages, background() as tasks:
        await request.stream(StreamData(input_subject=subject, upto=flow.upto))
        tasks.start(_hear(messages, stream))
        tasks.start(stream.send_keep_alives())
        try:
            yield stream
        finally:
            stream.end(LEFT)
            with suppress(BusError):
                await request.stream(StreamData(closed=stream.closed))


async def _hear(messages: AsyncIterator[Message], stream: ByteStream) -> None:
    """Process the client's messages. End the stream after SILENT_S without a message."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENT_S) as limit:
            async for message in messages:
                limit.reschedule(loop.time() + SILENT_S)
                stream.heard(validate(StreamData, open_envelope(message.body).data))
    except TimeoutError:
        stream.end(SILENT)
    except VirtbusError as error:
        stream.end(f"a message cannot be read: {error}")


@asynccontextmanager
async def opening(
    bus: Bus,
    subject: str,
    want: StreamOpen,
    *,
    window: int = WINDOW_BYTES,
    datagrams: bool = False,
) -> AsyncIterator[ByteStream]:
    """Open the client's end of a stream on `subject`. The context's exit closes the stream.

    Example for a console::

        subject = subjects.rpc(view.node, "agent", "console")
        async with opening(bus, subject, ConsoleOpen(uid=view.uid)) as stream:
            await stream.write(keys)
            while data := await stream.read():
                ...
            # stream.closed is the reason of the end

    Raises:
        VirtbusError: the service refused the stream.
        UnavailableError: no responder, no connection, or no answer in time.
    """
    flow = FlowControl(window)
    query = want.model_copy(update={"window": window})
    async with (
        bus.request_stream(subject, query, idle_timeout_s=SILENT_S) as answers,
        background() as tasks,
    ):
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                first = validate(StreamData, await anext(answers))
        except TimeoutError:
            msg = f"{subject}: no answer in {_FIRST_ANSWER_S:g} s"
            raise UnavailableError(msg) from None

        async def tell(piece: StreamData) -> None:
            await bus.publish(first.input_subject, piece)

        stream = ByteStream(tell, flow, datagrams=datagrams)
        stream.heard(first)
        tasks.start(_follow(answers, stream))
        tasks.start(stream.send_keep_alives())
        try:
            yield stream
        finally:
            stream.end(DETACHED)
            # This has no effect if the service closed the stream first.
            await tell(StreamData(closed=stream.closed))


async def _follow(answers: AsyncIterator[Any], stream: ByteStream) -> None:
    try:
        while not stream.closed:
            stream.heard(validate(StreamData, await anext(answers)))
    except (BusError, VirtbusError) as error:
        stream.end(str(error))
