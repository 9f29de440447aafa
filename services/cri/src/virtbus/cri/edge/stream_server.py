"""Serves exec, attach and port-forward to kubelet and crictl, on a port of the loopback.

A call of CRI returns a URL for one connection. The client must connect to the URL within a minute,
and requests SPDY or a websocket. The number of connections and the memory of each are limited.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from socket import SO_SNDBUF, SOL_SOCKET
from typing import NamedTuple, Protocol

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import background
from virtbus.cri.core import remote_command
from virtbus.cri.core.remote_command import Wanted
from virtbus.cri.edge.client_streams import (
    STREAMS_AT_ONCE,
    ChannelStreams,
    Raw,
    SpdyStreams,
    WebSocket,
)
from virtbus.cri.edge.pipes import Pipe
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
HEAD_BYTES = 16 * 1024
HEAD_S = 10.0
STREAMS_S = 30.0
"""Time limit for a client to open the streams of its request."""
TICKET_S = 60.0
TICKETS_AT_ONCE = 1000
TOKEN_BYTES = 16
CONNECTIONS_AT_ONCE = 256
SOCKET_BYTES = 128 * 1024
LEAVE_S = 2.0
"""Time limit for a client to read the end of its session."""
FORWARD, FORWARD_OVER_WEBSOCKET = "portforward.k8s.io", "SPDY/3.1+portforward.k8s.io"


class Command(NamedTuple):
    """A request for exec or attach. A request for attach has no `words`."""

    container_id: str
    wanted: Wanted
    words: tuple[str, ...] = ()


class Forward(NamedTuple):
    """A request for connections to ports of a pod."""

    sandbox_id: str


Ticket = Command | Forward


class Sessions(Protocol):
    """Serves the sessions of clients."""

    async def command(self, want: Command, pipes: Mapping[str, Pipe]) -> int:
        """Serve exec or attach, and return the exit code.

        Raises VirtbusError, BusError.
        """

    async def forward(self, want: Forward, port: int, pipe: Pipe) -> None:
        """Carry one connection to a port.

        Raises VirtbusError, BusError.
        """


class _RefusedError(Exception):
    """The request is refused. The text is the HTTP status, and may have headers after it."""


class StreamServer:
    """The port, and the tickets. A ticket is a request whose client has not connected yet."""

    def __init__(self, sessions: Sessions, sources: Sources) -> None:
        self._sessions = sessions
        self._sources = sources
        self._tickets: dict[str, tuple[float, Ticket]] = {}
        self._port = 0
        self._connections = 0

    def url(self, ticket: Ticket) -> str:
        """Return the URL of a new session.

        Raises VirtbusError 429 `too_many_sessions`.
        """
        now_s = asyncio.get_running_loop().time()
        for token, (until_s, _) in tuple(self._tickets.items()):
            if until_s < now_s:
                del self._tickets[token]
        if len(self._tickets) >= TICKETS_AT_ONCE:
            message = "too many sessions wait for their client; repeat the call in a minute"
            raise VirtbusError(Code.EXHAUSTED, "too_many_sessions", message)
        token = self._sources.secret(TOKEN_BYTES).hex()
        self._tickets[token] = (now_s + TICKET_S, ticket)
        return f"http://{HOST}:{self._port}/{token}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with background() as tasks:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                tasks.start(self._connection(reader, writer))

            server = await asyncio.start_server(connected, HOST, 0, limit=HEAD_BYTES)
            self._port = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        # Without this limit, the kernel buffers megabytes for a client that does not read.
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SOCKET_BYTES)
        try:
            await self._serve(reader, writer)
        except _RefusedError as error:
            told = f"HTTP/1.1 {error}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(told.encode())
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            log.info("a client left its session: %s", error, extra={"code": "session_left"})
        except Exception:  # a defect in one session must not end other sessions
            log.exception("a session failed", extra={"code": "session_failed"})
        finally:
            self._connections -= 1
            await _close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections > CONNECTIONS_AT_ONCE:
            raise _RefusedError("503 Too Many Connections")
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _RefusedError("431 Request Header Fields Too Large") from None
        path, headers = _parsed(head)
        until_s, ticket = self._tickets.pop(path.removeprefix("/"), (0.0, None))
        if ticket is None or until_s < asyncio.get_running_loop().time():
            raise _RefusedError("404 Not Found")
        raw = Raw(reader, writer)
        match headers.get("upgrade", [""])[0].lower():
            case "websocket":
                await self._websocket(ticket, raw, head, headers)
            case "spdy/3.1":
                await self._spdy(ticket, raw, headers)
            case _:
                raise _RefusedError("400 Upgrade To SPDY/3.1 Or A Websocket")

    async def _websocket(
        self, ticket: Ticket, raw: Raw, head: bytes, headers: Mapping[str, list[str]]
    ) -> None:
        forwards = isinstance(ticket, Forward)
        known = (FORWARD_OVER_WEBSOCKET,) if forwards else remote_command.WEBSOCKET_PROTOCOLS
        offered = headers.get("sec-websocket-protocol", [])
        chosen = next((one for one in known if one in offered), None)
        if chosen is None:
            raise _RefusedError(f"400 Offer The Websocket Protocol {known[0]}")
        socket = WebSocket(raw)
        if not await socket.accept(head, chosen):
            return
        if isinstance(ticket, Forward):
            await self._forwards(ticket, SpdyStreams(socket))
        else:
            await self._command(ticket, ChannelStreams(socket))

    async def _spdy(self, ticket: Ticket, raw: Raw, headers: Mapping[str, list[str]]) -> None:
        offered = headers.get("x-stream-protocol-version", [])
        wanted = FORWARD if isinstance(ticket, Forward) else remote_command.SPDY_PROTOCOL
        if offered and wanted not in offered:
            raise _RefusedError(f"403 Forbidden\r\nX-Accepted-Stream-Protocol-Versions: {wanted}")
        answer = (
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
            f"X-Stream-Protocol-Version: {wanted}\r\n\r\n"
        )
        await raw.write(answer.encode())
        if isinstance(ticket, Forward):
            await self._forwards(ticket, SpdyStreams(raw))
        else:
            await self._command(ticket, SpdyStreams(raw))

    async def _command(self, want: Command, streams: SpdyStreams | ChannelStreams) -> None:
        """Serve exec or attach until the session ends or the client leaves."""
        async with background() as tasks:
            reading = tasks.start(streams.run())
            async with asyncio.timeout(STREAMS_S):
                pipes = await streams.named(want.wanted.names)
            serving = tasks.start(self._told(want, pipes))
            await asyncio.wait({reading, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(LEAVE_S):
                        await streams.close()
                        await reading

    async def _told(self, want: Command, pipes: Mapping[str, Pipe]) -> None:
        try:
            exit_code = await self._sessions.command(want, pipes)
            status = remote_command.exited(exit_code) if exit_code else remote_command.succeeded()
        except (VirtbusError, BusError) as error:
            log.info("a session ended: %s", error, extra={"code": "session_ended"})
            status = remote_command.failed(str(error))
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LEAVE_S):
                await pipes[remote_command.ERROR].write(status)
                for pipe in pipes.values():
                    await pipe.finish()

    async def _forwards(self, want: Forward, streams: SpdyStreams) -> None:
        """Serve connections to ports until the client leaves.

        Each connection has two streams: one stream for data, and one stream for an error.
        """
        halves: dict[str, dict[str, Pipe]] = {}
        async with background() as tasks:
            tasks.start(streams.run())
            while (pipe := await streams.opened()) is not None:
                request = pipe.headers.get("requestid", "")
                pair = halves.setdefault(request, {})
                pair[pipe.headers.get("streamtype", "")] = pipe
                if pair.keys() >= _PAIR:
                    del halves[request]
                    tasks.start(self._forward(want, streams, pair))
                elif len(halves) > STREAMS_AT_ONCE:  # the client has reset the oldest one
                    del halves[next(iter(halves))]

    async def _forward(self, want: Forward, streams: SpdyStreams, pair: Mapping[str, Pipe]) -> None:
        data, errors = pair["data"], pair[remote_command.ERROR]
        try:
            await self._sessions.forward(want, _port(data.headers), data)
        except (VirtbusError, BusError) as error:
            with suppress(OSError):
                await errors.write(str(error).encode())
        finally:
            for pipe in (data, errors):
                with suppress(OSError):
                    await pipe.finish()
                streams.forget(pipe)


_PAIR = frozenset({"data", remote_command.ERROR})


def _port(headers: Mapping[str, str]) -> int:
    """Return the port in a stream's headers.

    Raises VirtbusError 400 `port_invalid`.
    """
    text = headers.get("port", "")
    if text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 2**16:
        return int(text[:6])
    raise VirtbusError(Code.INVALID, "port_invalid", f"{text!r:.20} is no port")


def _parsed(head: bytes) -> tuple[str, dict[str, list[str]]]:
    """Return the path and the headers of a request. The headers' values are split at commas."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _RefusedError("400 Bad Request")
    headers: dict[str, list[str]] = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        values = [part.strip() for part in value.split(",")]
        headers.setdefault(name.strip().lower(), []).extend(values)
    return words[1], headers


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, even if its client does not read."""
    writer.close()
    try:
        with suppress(OSError):
            async with asyncio.timeout(LEAVE_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()
