"""Clients of the streaming server, as kubelet and crictl have them: SPDY, and websockets."""

import asyncio
import json
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from virtbus.cri.core import spdy


class SpdyClient:
    """A connection to a URL of the CRI, with streams by their id."""

    reader: asyncio.StreamReader
    writer: "asyncio.StreamWriter | Tunnel"

    def __init__(self, url: str, protocol: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port)
        self._request = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: Upgrade\r\n"
            f"Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: {protocol}\r\n"
            "X-Stream-Protocol-Version: channel.k8s.io\r\n\r\n"
        )
        self._pack = zlib.compressobj(zdict=spdy.DICTIONARY)
        self._ids = iter(range(1, 100_000, 2))
        self.got: dict[int, bytes] = {}
        self.ended: set[int] = set()

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(self._request.encode())
        self.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.reader, self.writer = reader, writer
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.writer.close()

    def open(self, **headers: str) -> int:
        """Open a stream, and return its id."""
        stream_id = next(self._ids)
        block = struct.pack(">I", len(headers))
        for pair in headers.items():
            for text in pair:
                block += struct.pack(">I", len(text)) + text.encode()
        packed = self._pack.compress(block) + self._pack.flush(zlib.Z_SYNC_FLUSH)
        body = struct.pack(">IIH", stream_id, 0, 0) + packed
        self.writer.write(spdy.control(spdy.SYN_STREAM, body))
        self.got[stream_id] = b""
        return stream_id

    def send(self, stream_id: int, data: bytes, *, ends: bool = False) -> None:
        """Send bytes on a stream."""
        self.writer.write(spdy.data_frame(stream_id, data, ends=ends))

    async def until(self, stream_id: int, text: bytes) -> bytes:
        """Read until a stream has received `text`; return all of the stream."""
        while text not in self.got[stream_id]:
            await self._frame()
        return self.got[stream_id]

    async def until_ended(self, *stream_ids: int) -> None:
        """Read until streams have ended."""
        while not self.ended.issuperset(stream_ids):
            await self._frame()

    async def status(self, stream_id: int) -> Any:
        """Return the status on the error stream."""
        await self.until_ended(stream_id)
        return json.loads(self.got[stream_id])

    async def _frame(self) -> None:
        async with asyncio.timeout(10):
            first, rest = struct.unpack(">II", await self.reader.readexactly(8))
            body = await self.reader.readexactly(rest & 0xFFFFFF)
        if not first >> 31:
            self.got[first] += body
            if rest >> 24 & spdy.FIN:
                self.ended.add(first)


class Tunnel:
    """Carries a client's SPDY in the messages of a websocket, as kubectl and crictl do."""

    PROTOCOL = "SPDY/3.1+portforward.k8s.io"

    def __init__(self, url: str) -> None:
        self._url = url
        self._state = ClientProtocol(parse_uri(url.replace("http://", "ws://")), state=State.OPEN)
        self.client = SpdyClient(url, "")

    def write(self, data: bytes) -> None:
        """Send one message."""
        self._state.send_binary(data)
        self._writer.writelines(filter(None, self._state.data_to_send()))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def __aenter__(self) -> SpdyClient:
        reader, self._writer = await asyncio.open_connection(*self.client.address)
        path = urlsplit(self._url).path
        request = (
            f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            f"Sec-WebSocket-Protocol: {self.PROTOCOL}\r\n\r\n"
        )
        self._writer.write(request.encode())
        self.client.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert f"Sec-WebSocket-Protocol: {self.PROTOCOL}" in self.client.head
        self.client.reader, self.client.writer = asyncio.StreamReader(), self
        self._receiving = asyncio.Task(self._receive(reader))
        return self.client

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self._state.receive_data(data)
            for event in self._state.events_received():
                if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    self.client.reader.feed_data(event.data)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._receiving.cancel()
        self._writer.close()


@asynccontextmanager
async def websocket(url: str, protocol: str) -> AsyncIterator[ClientConnection]:
    """Open a websocket to a URL of the CRI."""
    there = url.replace("http://", "ws://")
    async with connect(there, subprotocols=[Subprotocol(protocol)], proxy=None) as socket:
        assert socket.subprotocol == protocol
        yield socket
