"""Carries a client's streams over SPDY, or over the channels of a websocket (ADR 0067)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from typing import Protocol

from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from virtbus.cri.core import remote_command, spdy
from virtbus.cri.edge.pipes import Pipe

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
MESSAGE_BYTES = 1024 * 1024
"""Maximum length of a websocket message. Kubernetes' clients send at most 32 KiB."""
STREAMS_AT_ONCE = 256
PIECE_BYTES = 32 * 1024


class Bytes(Protocol):
    """A connection that carries bytes in both directions."""

    async def read(self) -> bytes | None:
        """Return the next bytes; None at the end."""

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait while the client is slow.

        Raises OSError if the client left.
        """


class Raw:
    """The bytes of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes | None:
        return await self._reader.read(READ_BYTES) or None

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


class WebSocket:
    """The messages of a websocket, as bytes."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._state = ServerProtocol(max_size=MESSAGE_BYTES)
        self._messages = self._received()

    async def accept(self, head: bytes, protocol: str) -> bool:
        """Accept the request `head` with `protocol`; return False if the request is malformed.

        The library does not get the header with the client's protocols. With the header, the
        library would refuse the request: one of Kubernetes' protocol names is no HTTP token.
        """
        lines = head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(_PROTOCOL.lower() + b":")]
        self._state.receive_data(b"\r\n".join(kept))
        accepted = False
        for event in self._state.events_received():
            if isinstance(event, Request):
                response = self._state.accept(event)
                accepted = response.status_code == HTTPStatus.SWITCHING_PROTOCOLS
                if accepted:
                    response.headers[_PROTOCOL.decode()] = protocol
                self._state.send_response(response)
        await self._flush()
        return accepted

    async def read(self) -> bytes | None:
        return await anext(self._messages, None)

    async def write(self, data: bytes) -> None:
        try:
            self._state.send_binary(data)
        except InvalidState as error:
            raise ConnectionResetError("the client closed the websocket") from error
        await self._flush()

    async def close(self) -> None:
        """Send the end of the websocket. Further calls have no effect."""
        try:
            self._state.send_close(1000)
        except InvalidState:
            return
        await self._flush()

    async def _received(self) -> AsyncIterator[bytes]:
        message = bytearray()
        while not self._state.close_expected() and (data := await self._raw.read()) is not None:
            self._state.receive_data(data)
            for event in self._state.events_received():
                if not isinstance(event, Frame) or event.opcode not in _CONTENT:
                    continue
                message += event.data
                if event.fin:
                    yield bytes(message)
                    message.clear()
            await self._flush()

    async def _flush(self) -> None:
        for data in self._state.data_to_send():
            if data:
                await self._raw.write(data)


_PROTOCOL = b"Sec-WebSocket-Protocol"
_CONTENT = frozenset({Opcode.BINARY, Opcode.TEXT, Opcode.CONT})


class SpdyStreams:
    """The streams that a client opens over SPDY."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        self._reader = spdy.SpdyReader()
        self._writer = spdy.SpdyWriter()
        self._pipes: dict[int, Pipe] = {}
        self._opened: asyncio.Queue[Pipe | None] = asyncio.Queue()

    async def opened(self) -> Pipe | None:
        """Return the next stream that the client opens; None when the client has left."""
        return await self._opened.get()

    async def named(self, names: frozenset[str]) -> Mapping[str, Pipe]:
        """Wait until the client has opened the streams `names`; return the streams by name.

        Raises:
            OSError: the client left.
        """
        found: dict[str, Pipe] = {}
        while not found.keys() >= names:
            pipe = await self.opened()
            if pipe is None:
                raise ConnectionResetError("the client left before it opened its streams")
            found[pipe.headers.get("streamtype", "")] = pipe
        return found

    async def run(self) -> None:
        """Read until the client leaves or violates the protocol."""
        try:
            while (data := await self._raw.read()) is not None:
                for event in self._reader.feed(data):
                    await self._take(event)
        except OSError:
            pass
        except spdy.SpdyError as error:
            log.info("a client sent %s", error, extra={"code": "session_broken"})
        finally:
            self._opened.put_nowait(None)
            for pipe in self._pipes.values():
                pipe.leave()

    async def _take(self, event: spdy.Event) -> None:
        match event:
            case spdy.Opened(stream_id, headers, ended):
                await self._open(stream_id, headers, ended=ended)
            case spdy.Data(stream_id, data, ended):
                pipe = self._pipes.get(stream_id)
                if pipe is not None:
                    await pipe.feed(data, ended=ended)
            case spdy.Reset(stream_id):
                pipe = self._pipes.pop(stream_id, None)
                if pipe is not None:
                    pipe.leave()
            case spdy.Answer(data):
                await self._raw.write(data)
            case spdy.Left():
                pass

    async def _open(self, stream_id: int, headers: dict[str, str], *, ended: bool) -> None:
        # A stream that the client has reset counts until `opened` returns it.
        most = max(len(self._pipes), self._opened.qsize())
        if most >= STREAMS_AT_ONCE or stream_id in self._pipes:
            await self._raw.write(spdy.refusal(stream_id))
            return

        async def send(data: bytes, ends: bool) -> None:
            for piece in _pieces(data):
                await self._raw.write(spdy.data_frame(stream_id, piece, ends=ends))

        self._pipes[stream_id] = pipe = Pipe(send, headers)
        await self._raw.write(self._writer.reply(stream_id))
        if ended:
            await pipe.feed(b"", ended=True)
        self._opened.put_nowait(pipe)

    def forget(self, pipe: Pipe) -> None:
        """Drop a stream that has ended, so that the client may open another stream."""
        pipe.leave()
        for stream_id, one in tuple(self._pipes.items()):
            if one is pipe:
                del self._pipes[stream_id]

    async def close(self) -> None:
        await self._raw.write(spdy.farewell())


class ChannelStreams:
    """The streams of exec and attach over a websocket.

    The first byte of a message is the number of its channel.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._pipes = {
            name: Pipe(_Sender(socket, number), {"streamtype": name})
            for number, name in enumerate(remote_command.CHANNELS)
        }

    async def named(self, names: frozenset[str]) -> Mapping[str, Pipe]:
        """Return the streams `names` by name.

        An empty message to the client marks the beginning of the session.
        """
        greeted = next(name for name in _GREETED if name in names)
        await self._pipes[greeted].write(b"")
        return {name: pipe for name, pipe in self._pipes.items() if name in names}

    async def run(self) -> None:
        try:
            while (message := await self._socket.read()) is not None:
                if not message:
                    continue
                channel, data = message[0], message[1:]
                if channel == remote_command.CLOSE_CHANNEL and data:
                    await self._feed(data[0], b"", ended=True)
                else:
                    await self._feed(channel, data, ended=False)
        except OSError:
            pass
        finally:
            for pipe in self._pipes.values():
                pipe.leave()

    async def _feed(self, channel: int, data: bytes, *, ended: bool) -> None:
        name = remote_command.CHANNELS[channel : channel + 1]
        if name in {(remote_command.STDIN,), (remote_command.RESIZE,)}:
            await self._pipes[name[0]].feed(data, ended=ended)

    async def close(self) -> None:
        await self._socket.close()


_GREETED = (remote_command.STDOUT, remote_command.STDERR, remote_command.ERROR)


class _Sender:
    """Sends to one channel. Only the whole websocket has an end, which `close` sends."""

    def __init__(self, socket: WebSocket, number: int) -> None:
        self._socket = socket
        self._prefix = bytes([number])

    async def __call__(self, data: bytes, ends: bool) -> None:
        if not ends:
            for piece in _pieces(data):
                await self._socket.write(self._prefix + piece)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces of at most PIECE_BYTES. Empty data has one empty piece."""
    for begin in range(0, len(data) or 1, PIECE_BYTES):
        yield data[begin : begin + PIECE_BYTES]
