"""Decompresses a layer in bounded pieces (IMG-14)."""

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from virtbus.imaged.core.archive import DamagedError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 1024**2
FREE_BYTES = 64 * 1024**2
"""Output that is always allowed, for any input size."""
MAX_MEMBERS = 500_000
"""Limit of gzip members, or zstd frames: each has a cost even without output. Layers with random
access have one for each entry."""
MAX_WINDOW_LOG = 27
"""128 MiB: the largest window that zstd itself accepts by default; it uses our memory."""
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a frame without data (RFC 8878, 3.1.2)."""


class _Stream(Protocol):
    """One member (gzip) or frame (zstd). `rest` holds the bytes after it, once `eof` is True."""

    eof: bool
    rest: bytes

    def decompress(self, data: bytes) -> Iterator[bytes]: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self.eof = False
        self.rest = b""

    def decompress(self, data: bytes) -> Iterator[bytes]:
        while True:
            piece = self._stream.decompress(data, PIECE_BYTES)
            data = self._stream.unconsumed_tail
            self.eof, self.rest = self._stream.eof, self._stream.unused_data
            yield piece
            if self.eof or (not data and len(piece) < PIECE_BYTES):
                return


class _Zstd:
    def __init__(self) -> None:
        options = {int(zstd.DecompressionParameter.window_log_max): MAX_WINDOW_LOG}
        self._stream = zstd.ZstdDecompressor(options=options)
        self.eof = False
        self.rest = b""

    def decompress(self, data: bytes) -> Iterator[bytes]:
        while True:
            piece = self._stream.decompress(data, PIECE_BYTES)
            data = b""
            self.eof, self.rest = self._stream.eof, self._stream.unused_data
            yield piece
            if self.eof or self._stream.needs_input:
                return


def decoded(raw: Iterator[bytes], max_bytes: int, max_ratio: int) -> Iterator[bytes]:
    """Yield the content of `raw` (gzip, zstd or neither, by its first bytes) in pieces up to 1 MiB.

    Raises:
        DamagedError: it cannot be decompressed, or expands beyond `max_bytes` or `max_ratio` times
            its size.
    """
    done_bytes = read_bytes = 0

    def counted() -> Iterator[bytes]:
        nonlocal read_bytes
        for chunk in raw:
            read_bytes += len(chunk)
            yield chunk

    try:
        for piece in _pieces(counted()):
            done_bytes += len(piece)
            if done_bytes > max_bytes:
                msg = f"it expands to more than {max_bytes} bytes (setting max_bytes)"
                raise DamagedError(msg)
            if done_bytes > FREE_BYTES + max_ratio * read_bytes:
                msg = (
                    f"it expands more than {max_ratio}-fold (setting max_expansion), as little but "
                    "zeros does; ship the disk as qcow2, which leaves them out"
                )
                raise DamagedError(msg)
            yield piece
    except (zlib.error, zstd.ZstdError) as error:
        msg = f"it cannot be decompressed ({error})"
        raise DamagedError(msg) from None


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(chunks, b"")
    kind = _kind(first)
    if kind is None:
        yield first
        yield from chunks
        return
    streams = _members(kind)
    stream = next(streams)
    yield from stream.decompress(first)
    while True:
        while stream.eof and stream.rest:  # members and frames may follow one another
            rest, stream = stream.rest, next(streams)
            yield from stream.decompress(rest)
        chunk = next(chunks, b"")
        if not chunk:
            break
        if stream.eof:
            stream = next(streams)
        yield from stream.decompress(chunk)
    if not stream.eof:
        msg = "its compressed data is cut short"
        raise DamagedError(msg)


def _members(kind: Callable[[], _Stream]) -> Iterator[_Stream]:
    for _ in range(MAX_MEMBERS):
        yield kind()
    msg = f"its compressed data has more than {MAX_MEMBERS} parts; build the image again"
    raise DamagedError(msg)


def _kind(first: bytes) -> type[_Gzip] | type[_Zstd] | None:
    if first.startswith(_GZIP):
        return _Gzip
    if first.startswith(_ZSTD) or (first[1:4] == _ZSTD_SKIPPED and 0x50 <= first[0] <= 0x5F):
        return _Zstd
    return None
