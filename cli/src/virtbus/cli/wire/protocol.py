"""Parses received bytes of the NATS client protocol into messages and lines; opens no socket.

`virtbus.bus.client.nats_protocol` parses the messages (MSG, HMSG). This module parses the other
lines (INFO, PING, PONG, +OK, -ERR), as the protocol page of the NATS documentation defines them.
"""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from virtbus.bus.client.nats_protocol import MalformedError, headers_of, take_messages

MAX_LINE_BYTES = 64 * 1024


class WireMessage(NamedTuple):
    """A delivered message. `status` is the server's status (503: no responders), or empty."""

    subject: str
    sid: int
    reply: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = {}

    @property
    def status(self) -> str:
        return self.headers.get("Status", "")


class Line(NamedTuple):
    """A line of the server that is not a message, such as PING."""

    verb: str
    text: str = ""


class Reader:
    """Collects received bytes and returns the messages and lines in them, one at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._awaited = 0
        self._complete: deque[WireMessage | Line] = deque()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_event(self) -> WireMessage | Line | None:
        """Return the next complete message or line, or None while bytes are missing.

        Raises:
            MalformedError: the bytes do not follow the NATS protocol.
        """
        while not self._complete and len(self._buffer) >= max(self._awaited, 1):
            used, self._awaited = take_messages(bytes(self._buffer), self._deliver)
            del self._buffer[:used]
            if self._awaited or not self._line():
                break
        return self._complete.popleft() if self._complete else None

    def _deliver(self, sid: int, subject: bytes, reply: bytes, head: bytes, body: bytes) -> None:
        names = subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace")
        self._complete.append(WireMessage(names[0], sid, names[1], body, headers_of(head)))

    def _line(self) -> bool:
        """Queue the next line, which is not a message; return False for an incomplete line."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                msg = "the server sent an endless line"
                raise MalformedError(msg)
            return False
        line = self._buffer[:end].decode("utf-8", "replace")
        del self._buffer[: end + 2]
        verb, _, text = line.partition(" ")
        if verb.upper() not in {"INFO", "PING", "PONG", "+OK", "-ERR"}:
            msg = f"the server does not speak NATS: {line[:40]!r}"
            raise MalformedError(msg)
        self._complete.append(Line(verb.upper(), text))
        return True


def info_of(line: Line) -> dict[str, Any]:
    """Return the fields of the server's INFO.

    Raises:
        MalformedError: the line is not INFO, or its JSON cannot be read.
    """
    try:
        fields = json.loads(line.text) if line.verb == "INFO" else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        msg = "the server's greeting cannot be read; is it a NATS server?"
        raise MalformedError(msg)
    return fields


def connect_line(fields: Mapping[str, Any]) -> bytes:
    """Return the CONNECT line with `fields` as its JSON options."""
    return b"CONNECT " + json.dumps(fields, separators=(",", ":")).encode() + b"\r\n"
