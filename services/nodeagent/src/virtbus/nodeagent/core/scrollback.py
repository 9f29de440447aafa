"""Buffers a console's newest bytes (CON-05).

A byte's position is the number of bytes before it, including dropped bytes.
"""

ROOM_BYTES = 4 * 1024 * 1024
"""The memory limit per console, for any output and number of viewers."""
SEAM_BYTES = 16 * 1024
"""The maximum overlap: live bytes that the log may contain at its reading."""


class Scrollback:
    """The buffer. `start` is the position of the oldest stored byte, `end` of the next new byte."""

    def __init__(self, room: int = ROOM_BYTES) -> None:
        self._kept = bytearray()
        self._room = room
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + len(self._kept)

    def add(self, data: bytes) -> None:
        self._kept += data
        self._drop()

    def begin(self, log: bytes) -> int:
        """Insert the log before the live bytes. Return the position of the first live byte.

        Overlapping bytes are stored once.
        """
        if self.start:  # live bytes have filled the buffer
            return self.start
        live = bytes(self._kept[:SEAM_BYTES])
        size = next((k for k in range(len(live), 0, -1) if log.endswith(live[:k])), 0)
        before = log[: len(log) - size]
        self._kept[:0] = before
        self._drop()
        return len(before)

    def read(self, position: int, most: int) -> bytes | None:
        """Return up to `most` bytes from `position`; None if they were dropped."""
        if position < self.start:
            return None
        offset = position - self.start
        return bytes(self._kept[offset : offset + most])

    def _drop(self) -> None:
        over = len(self._kept) - self._room
        if over > 0:
            del self._kept[:over]
            self.start += over
