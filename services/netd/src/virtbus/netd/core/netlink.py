"""Encoding and decoding of netlink messages, replies and attributes (`linux/netlink.h`).

pyroute2 encodes the bodies of most rtnetlink messages (`edge.rtnl`).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NLM_F_REQUEST = 0x001
NLM_F_ACK = 0x004
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_APPEND = 0x800
NLM_F_DUMP = 0x300
NLM_F_DUMP_INTR = 0x010

NLMSG_ERROR = 2
NLMSG_DONE = 3

_NESTED = 0x8000
_HEADER = struct.Struct("=IHHII")
HEADER_BYTES = _HEADER.size
_ATTR = struct.Struct("=HH")


@dataclass(frozen=True, slots=True)
class NetlinkCall:
    """One message to send. `name` describes the request in errors.

    A refusal with one of the `tolerated` errnos counts as success.
    """

    name: str
    type: int
    flags: int
    body: bytes
    acked: bool = True
    tolerated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """One received message.

    `error` is a positive errno, 0 for an acknowledgement, and None for any other message.
    """

    sequence: int
    type: int
    flags: int
    message: bytes
    """The whole message with its header."""
    error: int | None = None


def attr(kind: int, payload: bytes) -> bytes:
    """Encode one attribute, padded to 4 bytes."""
    return _ATTR.pack(4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def nest(kind: int, *children: bytes) -> bytes:
    """Encode an attribute that contains attributes."""
    return attr(kind | _NESTED, b"".join(children))


def text(kind: int, value: str) -> bytes:
    """Encode a NUL-terminated string attribute."""
    return attr(kind, value.encode() + b"\0")


def be32(kind: int, value: int) -> bytes:
    """Encode an attribute of 32 bits in network byte order (nfnetlink)."""
    return attr(kind, struct.pack(">I", value & 0xFFFFFFFF))


def be64(kind: int, value: int) -> bytes:
    """Encode an attribute of 64 bits in network byte order (nfnetlink)."""
    return attr(kind, struct.pack(">Q", value))


def find_attr(message: bytes, offset: int, kind: int) -> bytes:
    """Return the payload of the first attribute of a kind from `offset` on; empty if none."""
    while offset + _ATTR.size <= len(message):
        length, found = _ATTR.unpack_from(message, offset)
        if found == kind or length < _ATTR.size:
            return message[offset + _ATTR.size : offset + length]
        offset += (length + 3) & ~3
    return b""


def attributes(body: bytes) -> Iterator[bytes]:
    """Yield the payloads of all attributes in `body`, in order."""
    offset = 0
    while offset + _ATTR.size <= len(body):
        length, _kind = _ATTR.unpack_from(body, offset)
        if length < _ATTR.size:
            return
        yield body[offset + _ATTR.size : offset + length]
        offset += (length + 3) & ~3


def frame(call: NetlinkCall, sequence: int) -> bytes:
    """Return the bytes of one message."""
    flags = NLM_F_REQUEST | call.flags | (NLM_F_ACK if call.acked else 0)
    padding = bytes(-len(call.body) % 4)
    return (
        _HEADER.pack(_HEADER.size + len(call.body), call.type, flags, sequence, 0)
        + call.body
        + padding
    )


def replies(datagram: bytes) -> Iterator[Reply]:
    """Yield the messages of one datagram, up to a truncated message."""
    offset = 0
    while offset + _HEADER.size <= len(datagram):
        length, kind, flags, sequence, _pid = _HEADER.unpack_from(datagram, offset)
        if length < _HEADER.size or offset + length > len(datagram):
            return
        message = datagram[offset : offset + length]
        failed = kind == NLMSG_ERROR
        error = -struct.unpack_from("=i", message, HEADER_BYTES)[0] if failed else None
        yield Reply(sequence, kind, flags, message, error)
        offset += (length + 3) & ~3
