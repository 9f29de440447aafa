"""Turns a console's output into lines of CRI's log format.

Each line is `<time> stdout <F|P> <text>`. F marks a complete line, or the last part of a longer
line. P marks each other part. The guest is hostile, so the memory for an unfinished line is
limited. After a silence of the guest, the caller writes an unfinished line, such as a prompt, as a
part (`flush`).
"""

from collections.abc import Iterator

LINE_BYTES = 16 * 1024
"""Maximum length of the text in one log line, as in containerd."""


class LogLines:
    """Collects output, and returns complete log lines."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> int:
        """Return the number of bytes that no log line has yet."""
        return len(self._rest)

    def feed(self, data: bytes, stamp: str) -> bytes:
        """Return log lines for the complete lines, and for the full parts of a longer line.

        `stamp` is the time in RFC 3339.
        """
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [line for one in whole for line in _cut(one.removesuffix(b"\r"))]
        while len(rest) > LINE_BYTES:
            lines.append((b"P", rest[:LINE_BYTES]))
            rest = rest[LINE_BYTES:]
        self._rest = rest
        return _joined(lines, stamp)

    def flush(self, stamp: str) -> bytes:
        lines = [(b"P", self._rest)] if self._rest else []
        self._rest = b""
        return _joined(lines, stamp)


def _cut(line: bytes) -> Iterator[tuple[bytes, bytes]]:
    while len(line) > LINE_BYTES:
        yield b"P", line[:LINE_BYTES]
        line = line[LINE_BYTES:]
    yield b"F", line


def _joined(lines: list[tuple[bytes, bytes]], stamp: str) -> bytes:
    head = f"{stamp} stdout ".encode()
    return b"".join(head + tag + b" " + text + b"\n" for tag, text in lines)
