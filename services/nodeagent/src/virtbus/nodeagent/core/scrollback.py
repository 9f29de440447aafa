"""Buffers a console's newest bytes. A position is the number of bytes before a byte (CON-05)."""

ROOM_BYTES = 4 * 1024 * 1024
"""The maximum memory per console, for any output and any number of viewers."""
SEAM_BYTES = 16 * 1024
"""The maximum overlap: live bytes that the log may already contain when it is read."""


class Scrollback:
    """The buffer. `start` is the position of the oldest stored byte, `end` of the next new one."""

    def __init__(self, room: int = ROOM_BYTES) -> None:
        self._kept = bytearray()
        self._room = room
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + len(self._kept)

    def add(self, data: bytes) -> None:
        """Append `data`, and drop the oldest bytes beyond the limit."""
        self._kept += data
        self._drop()

    def begin(self, log: bytes) -> int:
        """Insert the log before the live bytes; return the position where the live bytes begin.

        Bytes that are in both are stored once.
        """
        if self.start:  # so many live bytes arrived that there is no space for older ones
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
