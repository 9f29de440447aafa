"""Reads and writes frames of SPDY/3.1, the transport of Kubernetes for exec and port-forward.

The module implements the server's end, and does no I/O. The length of a header block is limited,
both compressed and uncompressed. Data is passed on in the pieces in which it arrives, so a long
data frame needs little memory.

As in Kubernetes' own implementation, SPDY's windows are ignored. A receiver that can take no more
data stops reading from the connection.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

_WORDS = (
    "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|"
    "accept-ranges|age|allow|authorization|cache-control|connection|content-base|"
    "content-encoding|content-language|content-length|content-location|content-md5|"
    "content-range|content-type|date|etag|expect|expires|from|host|if-match|if-modified-since|"
    "if-none-match|if-range|if-unmodified-since|last-modified|location|max-forwards|pragma|"
    "proxy-authenticate|proxy-authorization|range|referer|retry-after|server|te|trailer|"
    "transfer-encoding|upgrade|user-agent|vary|via|warning|www-authenticate|method|get|status|"
    "200 OK|version|HTTP/1.1|url|public|set-cookie|keep-alive|origin"
)
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 "
    "Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age="
    "gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(struct.pack(">I", len(word)) + word.encode() for word in _WORDS.split("|"))
    + _REST.encode()
)
"""The dictionary for the compression of header blocks, as the specification of SPDY lists it."""

VERSION = 0x8003
SYN_STREAM, SYN_REPLY, RST_STREAM, SETTINGS, PING, GOAWAY, HEADERS, WINDOW_UPDATE = (
    *(1, 2, 3, 4, 6, 7, 8, 9),
)
FIN = 1
REFUSED_STREAM = 3
MOST_CONTROL_BYTES = 16 * 1024
MOST_HEADER_BYTES = 16 * 1024
"""Maximum length of an uncompressed header block. Kubernetes sends a few hundred bytes."""
_HEAD = 8


class SpdyError(Exception):
    """The client violated the protocol. The connection must end."""


class Opened(NamedTuple):
    """The client opened a stream. Header names are in lower case. `ended`: see `Data`."""

    stream_id: int
    headers: dict[str, str]
    ended: bool


class Data(NamedTuple):
    """Bytes of a stream. With `ended`, the client sends no more bytes on this stream."""

    stream_id: int
    data: bytes
    ended: bool


class Reset(NamedTuple):
    """The client aborted a stream."""

    stream_id: int


class Answer(NamedTuple):
    """Bytes to send back: the answer to a ping."""

    data: bytes


class Left(NamedTuple):
    """The client will open no more streams (GOAWAY)."""


Event = Opened | Data | Reset | Answer | Left


class SpdyReader:
    """Splits the client's bytes into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._unpack = zlib.decompressobj(zdict=DICTIONARY)
        self._stream_id = 0
        self._left = 0
        self._ends = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that `data` completes.

        Raises SpdyError.
        """
        self._buffer += data
        while self._buffer:
            if self._left:
                yield self._piece()
            elif len(self._buffer) < _HEAD:
                return
            else:
                kind, length = struct.unpack_from(">I", self._buffer)[0], self._length()
                if not kind >> 31:
                    yield from self._begin_data(kind, length)
                elif length > MOST_CONTROL_BYTES:
                    raise SpdyError(f"a control frame of {length} bytes")
                elif len(self._buffer) < _HEAD + length:
                    return
                else:
                    flags = self._buffer[4]
                    body = bytes(self._buffer[_HEAD : _HEAD + length])
                    del self._buffer[: _HEAD + length]
                    yield from self._control(kind, flags, body)

    def _length(self) -> int:
        return int.from_bytes(self._buffer[5:_HEAD], "big")

    def _begin_data(self, stream_id: int, length: int) -> Iterator[Event]:
        self._stream_id, self._left, self._ends = stream_id, length, bool(self._buffer[4] & FIN)
        del self._buffer[:_HEAD]
        if not length:
            yield Data(stream_id, b"", self._ends)

    def _piece(self) -> Data:
        data = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        self._left -= len(data)
        return Data(self._stream_id, data, self._ends and not self._left)

    def _control(self, kind: int, flags: int, body: bytes) -> Iterator[Event]:
        if kind >> 16 != VERSION:
            raise SpdyError("another version of SPDY than 3.1")
        try:
            match kind & 0xFFFF:
                case 1:
                    stream_id = struct.unpack_from(">I", body)[0] & 0x7FFFFFFF
                    yield Opened(stream_id, self._headers(body[10:]), bool(flags & FIN))
                case 2 | 8:
                    # All header blocks share one zlib stream, so each block must be decompressed.
                    self._headers(body[4:])
                case 3:
                    yield Reset(struct.unpack_from(">I", body)[0] & 0x7FFFFFFF)
                case 6:
                    yield Answer(control(PING, body))
                case 7:
                    yield Left()
                case _:
                    pass
        except (struct.error, zlib.error, UnicodeDecodeError) as error:
            raise SpdyError(f"a malformed frame: {error}") from error

    def _headers(self, packed: bytes) -> dict[str, str]:
        block = self._unpack.decompress(packed, MOST_HEADER_BYTES)
        if self._unpack.unconsumed_tail:
            raise SpdyError(f"headers of more than {MOST_HEADER_BYTES} bytes")
        count, at, found = struct.unpack_from(">I", block)[0], 4, {}
        for _ in range(count):
            texts = []
            for _ in range(2):
                length = struct.unpack_from(">I", block, at)[0]
                texts.append(block[at + 4 : at + 4 + length].decode())
                at += 4 + length
            found[texts[0].lower()] = texts[1]
        return found


class SpdyWriter:
    """Makes the server's frames."""

    def __init__(self) -> None:
        self._pack = zlib.compressobj(zdict=DICTIONARY)

    def reply(self, stream_id: int) -> bytes:
        block = self._pack.compress(struct.pack(">I", 0)) + self._pack.flush(zlib.Z_SYNC_FLUSH)
        return control(SYN_REPLY, struct.pack(">I", stream_id) + block)


def control(kind: int, body: bytes, flags: int = 0) -> bytes:
    """Return a control frame of a kind such as PING."""
    return struct.pack(">HHI", VERSION, kind, flags << 24 | len(body)) + body


def data_frame(stream_id: int, data: bytes, *, ends: bool = False) -> bytes:
    """Return a frame with bytes of a stream. With `ends`, the stream ends after these bytes."""
    return struct.pack(">II", stream_id, (FIN if ends else 0) << 24 | len(data)) + data


def refusal(stream_id: int) -> bytes:
    """Return the frame that refuses a stream."""
    return control(RST_STREAM, struct.pack(">II", stream_id, REFUSED_STREAM))


def farewell() -> bytes:
    """Return the frame that refuses all further streams (GOAWAY)."""
    return control(GOAWAY, struct.pack(">II", 0, 0))
