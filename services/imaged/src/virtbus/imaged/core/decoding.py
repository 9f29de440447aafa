"""Decompresses a container image's layer, or an image, in pieces of limited size (IMG-14)."""

import lzma
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
"""Output that is always allowed, even for the smallest input."""
MAX_MEMBERS = 500_000
"""Limit of gzip members, xz streams or zstd frames. Each of them takes CPU time, even without
output. A layer that permits random access has one member for each entry of its tar."""
MAX_WINDOW_LOG = 27
"""The largest window has 2^27 bytes (128 MiB), which is also zstd's own default limit. The decoder
keeps a window in memory."""
MAX_XZ_BYTES = 68 * 1024**2
"""Memory limit of a decoder for xz. `xz -9`, the largest preset, needs 65 MiB."""
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a frame without data (RFC 8878, 3.1.2)."""


class _Stream(Protocol):
    """One member (gzip), stream (xz) or frame (zstd).

    When `eof` is True, `rest` has the bytes of the input after this stream.
    """

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


class _Decompressor(Protocol):
    """The interface of lzma and zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Framed:
    def __init__(self, stream: _Decompressor) -> None:
        self._stream = stream
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


def _xz() -> _Stream:
    return _Framed(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_BYTES))


def _zstd() -> _Stream:
    options = {int(zstd.DecompressionParameter.window_log_max): MAX_WINDOW_LOG}
    return _Framed(zstd.ZstdDecompressor(options=options))


def is_compressed(head: bytes) -> bool:
    """Return True for the first bytes of gzip, xz or zstd."""
    return _kind(head) is not None


def decoded(raw: Iterator[bytes], max_bytes: int, max_ratio: int) -> Iterator[bytes]:
    """Yield the content of `raw`, decompressed if its first bytes are those of gzip, xz or zstd.

    A piece of decompressed content has at most 1 MiB.

    Raises:
        DamagedError: `raw` cannot be decompressed, or has more than MAX_MEMBERS parts. The error is
            also raised if the content exceeds `max_bytes`, or 64 MiB plus `max_ratio` times the
            size of `raw`.
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
                    f"it expands more than {max_ratio}-fold (setting max_expansion), as only "
                    "zeros do; ship the disk as qcow2, which omits zeros"
                )
                raise DamagedError(msg)
            yield piece
    except (zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
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
        while stream.eof and (rest := _after(kind, stream.rest)):  # another member may follow
            stream = next(streams)
            yield from stream.decompress(rest)
        chunk = next(chunks, b"")
        if not chunk:
            break
        if stream.eof:
            chunk = _after(kind, chunk)
            if not chunk:
                continue
            stream = next(streams)
        yield from stream.decompress(chunk)
    if not stream.eof:
        msg = "its compressed data is cut short"
        raise DamagedError(msg)


def _after(kind: Callable[[], _Stream], rest: bytes) -> bytes:
    """Return the bytes after a member without the zeros that pad gzip and xz files."""
    return rest if kind is _zstd else rest.lstrip(b"\0")


def _members(kind: Callable[[], _Stream]) -> Iterator[_Stream]:
    for _ in range(MAX_MEMBERS):
        yield kind()
    msg = f"its compressed data has more than {MAX_MEMBERS} parts; build the image again"
    raise DamagedError(msg)


def _kind(first: bytes) -> Callable[[], _Stream] | None:
    if first.startswith(_GZIP):
        return _Gzip
    if first.startswith(_XZ):
        return _xz
    if first.startswith(_ZSTD) or (first[1:4] == _ZSTD_SKIPPED and 0x50 <= first[0] <= 0x5F):
        return _zstd
    return None
