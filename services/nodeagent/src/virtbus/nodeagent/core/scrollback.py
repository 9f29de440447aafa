"""The newest bytes of a console, by their position since its first (reliability.md CON-05)."""

ROOM_BYTES = 4 * 1024 * 1024
"""A console's share of memory at most, whatever the guest writes and however many look on."""
SEAM_BYTES = 16 * 1024
"""How much of what is live may be in the log already when the log is read."""


class Scrollback:
    """`start` is the oldest position that is kept, `end` the next one to come."""

    def __init__(self, room: int = ROOM_BYTES) -> None:
        self._kept = bytearray()
        self._room = room
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + len(self._kept)

    def add(self, data: bytes) -> None:
        """Keep `data`, and drop the oldest over the room."""
        self._kept += data
        self._drop()

    def begin(self, log: bytes) -> int:
        """Put the end of the log before what came live; returns where the live part begins.

        What is in both counts once: it is live.
        """
        if self.start:  # so much came meanwhile that there is no room for what was before
            return self.start
        live = bytes(self._kept[:SEAM_BYTES])
        size = next((k for k in range(len(live), 0, -1) if log.endswith(live[:k])), 0)
        before = log[: len(log) - size]
        self._kept[:0] = before
        self._drop()
        return len(before)

    def read(self, position: int, most: int) -> bytes | None:
        """Up to `most` bytes from `position`; None where it is older than what is kept."""
        if position < self.start:
            return None
        offset = position - self.start
        return bytes(self._kept[offset : offset + most])

    def _drop(self) -> None:
        over = len(self._kept) - self._room
        if over > 0:
            del self._kept[:over]
            self.start += over
