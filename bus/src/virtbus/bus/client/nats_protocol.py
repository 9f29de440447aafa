"""Parses received messages of a NATS connection, and formats publications."""

import re
from collections.abc import Callable, Mapping

from virtbus.bus.errors import FullError

LINE_BYTES = 4096
"""The longest MSG or HMSG line that a server sends (`max_control_line`)."""
MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that any server allows (the highest `max_payload`)."""
_CRLF = b"\r\n"
_VERSION = "NATS/1.0"
_NO_BREAKS = str.maketrans("\r\n", "  ")
_NO_SUBJECT = re.compile(r"[ \t\r\n]")

Deliver = Callable[[int, bytes, bytes, bytes, bytes], None]
"""Takes a message: subscription id, subject, reply subject, header block and body."""


class MalformedError(ValueError):
    """Received bytes break NATS's protocol, or a subject cannot be sent."""


def take_messages(block: bytes, deliver: Deliver) -> tuple[int, int]:
    """Deliver the complete messages at the beginning of `block`.

    Return two sizes in bytes: of the delivered messages, and of the incomplete message after them.
    The second size is 0 without such a message, and while its MSG or HMSG line is incomplete.

    Raises:
        MalformedError: a MSG or HMSG line is invalid, or its message does not end with CRLF.
    """
    at = 0
    while block.startswith((b"MSG ", b"HMSG "), at):
        end = block.find(_CRLF, at, at + LINE_BYTES)
        if end < 0:
            break
        fields = block[at:end].split()
        headed = fields[0] == b"HMSG"
        reply = b""
        if len(fields) == 5 + headed:
            reply = fields.pop(3)
        try:
            sid, total_bytes = int(fields[2]), int(fields[3 + headed])
            header_bytes = int(fields[3]) if headed else 0
        except (ValueError, IndexError):
            raise _malformed(block[at:end]) from None
        start = end + 2
        stop = start + total_bytes
        fits = 0 <= header_bytes <= total_bytes <= MESSAGE_BYTES
        if not fits or len(fields) != 4 + headed:
            raise _malformed(block[at:end])
        if stop + 2 > len(block):
            return at, stop + 2 - at
        if not block.startswith(_CRLF, stop):
            raise _malformed(block[at:end])
        body = start + header_bytes
        deliver(sid, fields[1], reply, block[start:body], block[body:stop])
        at = stop + 2
    return at, 0


def _malformed(line: bytes) -> MalformedError:
    return MalformedError(f"a message cannot be read: {line[:80]!r}")


def headers_of(block: bytes) -> dict[str, str]:
    """Return the headers of a message.

    A block begins with `NATS/1.0[ <status>[ <description>]]`, and has a line for each header.
    Status and description become the headers `Status` and `Description`. Any other first line is
    read as a header, because the server appends its own headers to a block without a line break.

    A name keeps its blanks. The server replaces a forged `Nats-Request-Info`, but overlooks a name
    that begins with a blank. If this function removed the blank, the forged header would be valid.
    """
    if not block:
        return {}
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    if first != _VERSION:
        found = _status(first)
        if not found:
            lines.insert(0, first)  # first, so that the server's header replaces a forged header
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name] = value.strip(" \t\r\n")
    return found


def _status(line: str) -> dict[str, str]:
    status, _, description = line[len(_VERSION) :].strip().partition(" ")
    if not status.isdigit():
        return {}
    return {"Status": status} | ({"Description": description} if description else {})


def publication(
    subject: str, body: bytes, reply: str, headers: Mapping[str, str], most_bytes: int
) -> bytes:
    """Return the PUB or HPUB command of a message.

    Raises:
        MalformedError: `subject` is empty, or `subject` or `reply` has a blank or line break.
        FullError: header block and body have more than `most_bytes`.
    """
    if not subject or _NO_SUBJECT.search(subject + reply):
        msg = f"no subject: {subject!r:.256} or {reply!r:.256}"
        raise MalformedError(msg)
    block = _block(headers) if headers else b""
    total_bytes = len(block) + len(body)
    if total_bytes > most_bytes:
        msg = f"{total_bytes} bytes are more than the bus takes ({most_bytes})"
        raise FullError(msg)
    if not block:
        return f"PUB {subject} {reply} {total_bytes}\r\n".encode() + body + _CRLF
    line = f"HPUB {subject} {reply} {len(block)} {total_bytes}\r\n"
    return b"".join((line.encode(), block, body, _CRLF))


def _block(headers: Mapping[str, str]) -> bytes:
    """Return the header block. A line break in a header becomes a space."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        pairs = [f"{name}: {value}".translate(_NO_BREAKS) for name, value in headers.items()]
        lines = "".join([f"{pair}\r\n" for pair in pairs])
    return f"{_VERSION}\r\n{lines}\r\n".encode()
