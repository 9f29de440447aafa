"""Reads a tar as a stream, with limits: the name, kind and data of one entry after another.

Formats: ustar, GNU's long names and numbers, PAX. The header data of an entry is limited, and read
completely. File data is passed on in pieces. Sparse archives are refused, because their sizes can
be false (SRC-16).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

BLOCK_BYTES = 512
MAX_ENTRIES = 500_000
MAX_EXTENDED_BYTES = 64 * 1024
"""Limit of one entry's long name or PAX records."""
MAX_NAME_BYTES = 4096
MAX_SIZE_BYTES = 1 << 62
_ZEROS = bytes(BLOCK_BYTES)
_OCTAL = re.compile(rb"[ \x00]*([0-7]*)[ \x00]*")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ")
_HEADER_ONLY = frozenset("123456")
"""Links, devices, folders and pipes have no data, even if they claim a size (as in Go's reader)."""
_EXTENDED = frozenset("xgLK")
"""Kinds of entries that describe the next entry, or all later entries: PAX records, a long name, a
long link target."""
_REGULAR = frozenset({"\0", "7"})


class DamagedError(Exception):
    """A layer of a container image, or an image, cannot be decoded.

    The message is the reason, for people. The digest of a layer is verified before, so a repeat
    cannot help.
    """


class ArchiveEntry(NamedTuple):
    """An entry of a tar.

    `parts` is the name without `.` and empty parts; `kind` is tar's type flag, `0` for a file.
    """

    parts: tuple[str, ...]
    kind: str
    size_bytes: int


class Archive:
    """The entries of a tar whose bytes arrive in `pieces`.

    Read an entry's data before the next call of `entry`, which skips data that was not read.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = memoryview(b"")  # slices of bytes would be copies
        self._data_bytes = 0
        self._padding_bytes = 0
        self._entries = 0

    def entry(self) -> ArchiveEntry | None:
        """Return the next entry, None at the end.

        Raises:
            DamagedError: the bytes are no tar, are truncated, or exceed a limit; or the entry is
                sparse, or its name leads out of the image.
        """
        for _ in self.data():
            pass
        extended = dict[str, bytes]()
        while header := self._header():
            kind, size = chr(header[156]), _number(header[124:136])
            if kind not in _EXTENDED:
                return self._begin(header, kind, size, extended)
            extended[kind] = self._extended(size)
        return None

    def _header(self) -> bytes:
        header = self._take(BLOCK_BYTES, may_end=True)
        if header in {b"", _ZEROS}:
            return b""
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            msg = f"it has more than {MAX_ENTRIES} entries"
            raise DamagedError(msg)
        _check_sum(header)
        return header

    def data(self) -> Iterator[bytes]:
        while self._data_bytes:
            piece = self._some(self._data_bytes)
            self._data_bytes -= len(piece)
            yield piece
        while self._padding_bytes:
            self._padding_bytes -= len(self._some(self._padding_bytes))

    def drain(self) -> Iterator[None]:
        """Read the bytes after the tar, so that the decoder checks them; yield after each piece."""
        self._buffer = memoryview(b"")
        for _ in self._pieces:
            yield

    def _begin(
        self, header: bytes, kind: str, size: int, extended: dict[str, bytes]
    ) -> ArchiveEntry:
        records = _pax(extended.get("x", b""))
        if kind == "S" or any(key.startswith(b"GNU.sparse.") for key in records):
            msg = "it is a sparse tar, which container tools do not make; make it without -S"
            raise DamagedError(msg)
        name = _name(header, extended.get("L", b"").rstrip(b"\0"), records)
        size = _size(size, records)
        if len(name) > MAX_NAME_BYTES or b"\0" in name:
            msg = f"it has a name of more than {MAX_NAME_BYTES} bytes, or with a NUL"
            raise DamagedError(msg)
        folder = name.endswith(b"/") and kind in _REGULAR | {"0"}
        kind = "5" if folder else "0" if kind in _REGULAR else kind
        text = name.decode("utf-8", "surrogateescape")
        parts = tuple(part for part in text.split("/") if part not in {"", "."})
        if ".." in parts:
            msg = f"it has an entry outside of the image: {printable(text)}"
            raise DamagedError(msg)
        self._data_bytes = 0 if kind in _HEADER_ONLY else size
        self._padding_bytes = -self._data_bytes % BLOCK_BYTES
        return ArchiveEntry(parts, kind, self._data_bytes)

    def _extended(self, size: int) -> bytes:
        if size > MAX_EXTENDED_BYTES:
            msg = f"the name or attributes of an entry have {size} bytes"
            raise DamagedError(msg)
        return self._take(size + -size % BLOCK_BYTES)[:size]

    def _some(self, most: int) -> bytes:
        while not self._buffer:
            piece = next(self._pieces, None)
            if piece is None:
                raise _cut()
            self._buffer = memoryview(piece)
        some, self._buffer = self._buffer[:most], self._buffer[most:]
        return bytes(some)

    def _take(self, size: int, *, may_end: bool = False) -> bytes:
        """Return exactly `size` bytes; with `may_end`, an empty value at the end."""
        taken = bytes(self._buffer[:size])
        self._buffer = self._buffer[size:]
        while len(taken) < size:
            piece = next(self._pieces, None)
            if piece is None and may_end and not taken:
                return b""
            if piece is None:
                raise _cut()
            missing = size - len(taken)
            taken += piece[:missing]
            self._buffer = memoryview(piece)[missing:]
        return taken


def printable(text: str) -> str:
    """Return a name from an archive in printable form."""
    return ascii(text[:200])


def _cut() -> DamagedError:
    return DamagedError("it is cut short")


def _check_sum(header: bytes) -> None:
    stored = _number(header[148:156])
    if stored != sum(header) - sum(header[148:156]) + 8 * 0x20:
        msg = "it is no tar (a header's checksum is wrong)"
        raise DamagedError(msg)


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU: binary, if octal digits do not suffice
        value = int.from_bytes(field[1:], "big")
    else:
        match = _OCTAL.fullmatch(field)
        if match is None:
            msg = "it is no tar (a number in a header is invalid)"
            raise DamagedError(msg)
        value = int(match[1] or b"0", 8)
    return _bounded(value)


def _bounded(size: int) -> int:
    if size > MAX_SIZE_BYTES:
        msg = f"an entry claims {size} bytes"
        raise DamagedError(msg)
    return size


def _name(header: bytes, long_name: bytes, records: dict[bytes, bytes]) -> bytes:
    if b"path" in records:
        return records[b"path"]
    if long_name:
        return long_name
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _size(size: int, records: dict[bytes, bytes]) -> int:
    text = records.get(b"size")
    if text is None:
        return size
    if not text.isdigit() or len(text) > 19:
        msg = "the size of an entry is no number"
        raise DamagedError(msg)
    return _bounded(int(text))


def _pax(extended: bytes) -> dict[bytes, bytes]:
    """Return the records in lines of `<length> <key>=<value>` (POSIX pax, "Extended Header")."""
    records, at = dict[bytes, bytes](), 0
    while at < len(extended):
        match = _PAX_RECORD.match(extended, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(extended) or extended[end - 1] != 0x0A:
            msg = "the attributes of an entry cannot be read"
            raise DamagedError(msg)
        key, equals, value = extended[match.end() : end - 1].partition(b"=")
        if not equals:
            msg = "the attributes of an entry cannot be read"
            raise DamagedError(msg)
        records[key] = value
        at = end
    return records
