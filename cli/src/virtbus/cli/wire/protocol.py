"""The NATS client protocol as bytes in, events out; no socket.

Source: the protocol page of the NATS documentation (INFO, CONNECT, PUB, HPUB, SUB, MSG, HMSG).
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_LINE_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_VERSION = b"NATS/1.0"


class ProtocolError(Exception):
    """The peer does not speak NATS."""


class Info(NamedTuple):
    """The server's INFO."""

    fields: dict[str, Any]


class WireMessage(NamedTuple):
    """A delivered message. `status` is the server's (503: no responder), otherwise 0."""

    subject: str
    sid: int
    reply: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = {}
    status: int = 0

    def header(self, name: str) -> str:
        """Return the value of a header in any case, or an empty string."""
        wanted = name.lower()
        return next((v for k, v in self.headers.items() if k.lower() == wanted), "")


class Ping(NamedTuple):
    """The server's keep-alive."""


class Pong(NamedTuple):
    """The server has handled everything sent before our PING."""


class ServerRefusal(NamedTuple):
    """`-ERR`: an operation that the server does not allow or support."""

    text: str


Event = Info | WireMessage | Ping | Pong | ServerRefusal


class _Announced(NamedTuple):
    """A MSG or HMSG line whose payload is incomplete."""

    subject: str
    sid: int
    reply: str
    header_bytes: int
    total_bytes: int


class Reader:
    """Collects bytes and returns events, one at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._announced: _Announced | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next_event(self) -> Event | None:
        """Return the next complete event, or None while bytes are missing.

        Raises:
            ProtocolError: the bytes are not NATS.
        """
        while True:
            if self._announced is not None:
                return self._payload(self._announced)
            end = self._buffer.find(b"\r\n")
            if end < 0:
                if len(self._buffer) > MAX_LINE_BYTES:
                    msg = "the server sent an endless line"
                    raise ProtocolError(msg)
                return None
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            event = self._line(line)
            if event is not None:
                return event

    def _line(self, line: bytes) -> Event | None:
        verb, _, rest = line.partition(b" ")
        event: Event | None = None
        match verb.upper():
            case b"MSG":
                self._announced = _announce(rest, headers=False)
            case b"HMSG":
                self._announced = _announce(rest, headers=True)
            case b"INFO":
                event = _info(rest)
            case b"PING":
                event = Ping()
            case b"PONG":
                event = Pong()
            case b"+OK":
                pass
            case b"-ERR":
                event = ServerRefusal(rest.decode("utf-8", "replace").strip().strip("'"))
            case _:
                msg = f"the server does not speak NATS: {line[:40]!r}"
                raise ProtocolError(msg)
        return event

    def _payload(self, head: _Announced) -> WireMessage | None:
        if len(self._buffer) < head.total_bytes + 2:
            return None
        raw = bytes(self._buffer[: head.total_bytes])
        if self._buffer[head.total_bytes : head.total_bytes + 2] != b"\r\n":
            msg = "a message is longer than announced"
            raise ProtocolError(msg)
        del self._buffer[: head.total_bytes + 2]
        self._announced = None
        headers, status = _headers(raw[: head.header_bytes]) if head.header_bytes else ({}, 0)
        body = raw[head.header_bytes :]
        return WireMessage(head.subject, head.sid, head.reply, body, headers, status)


def _announce(rest: bytes, *, headers: bool) -> _Announced:
    words = rest.decode("utf-8", "replace").split()
    sizes = 2 if headers else 1
    if len(words) not in {2 + sizes, 3 + sizes}:
        msg = f"a message line cannot be read: {rest[:80]!r}"
        raise ProtocolError(msg)
    try:
        sid, *numbers = (int(word) for word in (words[1], *words[-sizes:]))
    except ValueError:
        msg = f"a message line cannot be read: {rest[:80]!r}"
        raise ProtocolError(msg) from None
    header_bytes, total_bytes = numbers if headers else (0, numbers[0])
    if not 0 <= header_bytes <= total_bytes <= MAX_PAYLOAD_BYTES:
        msg = f"a message has an impossible size: {rest[:80]!r}"
        raise ProtocolError(msg)
    reply = words[2] if len(words) == 3 + sizes else ""
    return _Announced(words[0], sid, reply, header_bytes, total_bytes)


def _info(rest: bytes) -> Info:
    try:
        fields = json.loads(rest)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        msg = "the server's greeting cannot be read; is it a NATS server?"
        raise ProtocolError(msg)
    return Info(fields)


def _headers(raw: bytes) -> tuple[dict[str, str], int]:
    first, *lines = raw.decode("utf-8", "replace").split("\r\n")
    if not first.startswith(_VERSION.decode()):
        msg = "a message's headers cannot be read"
        raise ProtocolError(msg)
    code = first[len(_VERSION) :].split(maxsplit=1)[:1]
    status = int(code[0]) if code and code[0].isascii() and code[0].isdigit() else 0
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found, status


def connect_line(fields: Mapping[str, Any]) -> bytes:
    """Return CONNECT with these options."""
    return b"CONNECT " + json.dumps(fields, separators=(",", ":")).encode() + b"\r\n"


def subscribe_line(subject: str, sid: int) -> bytes:
    """Return SUB `subject` as `sid`."""
    return f"SUB {subject} {sid}\r\n".encode()


def unsubscribe_line(sid: int) -> bytes:
    """Return UNSUB `sid` at once."""
    return f"UNSUB {sid}\r\n".encode()


def publish_bytes(
    subject: str, body: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
) -> bytes:
    """Return PUB, or HPUB if there are headers, with its payload."""
    words = [subject, reply] if reply else [subject]
    if not headers:
        return f"PUB {' '.join([*words, str(len(body))])}\r\n".encode() + body + b"\r\n"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = _VERSION + b"\r\n" + lines.encode() + b"\r\n"
    words += [str(len(head)), str(len(head) + len(body))]
    return f"HPUB {' '.join(words)}\r\n".encode() + head + body + b"\r\n"
