"""Asks a server of network block devices for the sizes of its exports (ADR 0060).

The protocol is NBD's "Newstyle negotiation" (doc/proto.md of NetworkBlockDevice/nbd). The module
opens no export, and reads a bounded number of bytes.
"""

import asyncio
import contextlib
import struct
from collections.abc import Iterable

from virtbus.schemas.disk import DISK_MAX

SIZES_S = 3.0
"""Time limit of all questions to one server."""
_GREETING = struct.Struct(">16sH")
_MAGIC, _REPLY_MAGIC = b"NBDMAGICIHAVEOPT", 0x3E889045565A9
_FIXED_NEWSTYLE = struct.pack(">I", 1)
_OPTION, _REPLY = struct.Struct(">8sII"), struct.Struct(">QIII")
_ABORT, _INFO = 2, 6
_INFO_REPLY, _INFO_EXPORT = 3, 0
_EXPORT = struct.Struct(">HQH")
"""The server's information about an export: the kind of information, the size, and flags."""
_MOST_BYTES, _MOST_REPLIES = 4096, 16


async def export_sizes(host: str, port: int, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of exports in bytes, by name; leave out unknown sizes.

    A size above DISK_MAX counts as unknown, because no volume is that large.
    """
    found: dict[str, int] = {}
    writer: asyncio.StreamWriter | None = None
    with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
        try:
            async with asyncio.timeout(SIZES_S):
                reader, writer = await asyncio.open_connection(host, port)
                greeting, _ = _GREETING.unpack(await reader.readexactly(_GREETING.size))
                if greeting != _MAGIC:
                    return found
                writer.write(_FIXED_NEWSTYLE)
                for name in names:
                    size_bytes = await _size(reader, writer, name)
                    if size_bytes is not None and size_bytes <= DISK_MAX:
                        found[name] = size_bytes
                writer.write(_OPTION.pack(b"IHAVEOPT", _ABORT, 0))
                await writer.drain()
        finally:
            if writer is not None:
                writer.close()
    return found


async def _size(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
) -> int | None:
    """Return the size of one export; None if the server does not give a size.

    Raise ValueError for an answer that breaks the protocol.
    """
    data = struct.pack(">I", len(name)) + name.encode() + bytes(2)
    writer.write(_OPTION.pack(b"IHAVEOPT", _INFO, len(data)) + data)
    await writer.drain()
    found = None
    for _ in range(_MOST_REPLIES):
        head = await reader.readexactly(_REPLY.size)
        magic, option, kind, length = _REPLY.unpack(head)
        if (magic, option) != (_REPLY_MAGIC, _INFO) or length > _MOST_BYTES:
            break
        body = await reader.readexactly(length)
        if kind != _INFO_REPLY:
            return found
        if length == _EXPORT.size and _EXPORT.unpack(body)[0] == _INFO_EXPORT:
            found = _EXPORT.unpack(body)[1]
    msg = "the server does not answer as NBD's protocol says"
    raise ValueError(msg)
