"""Counts the bytes of one end of a byte stream for flow control (ADR 0023), without I/O.

Each direction counts its bytes from 0. A limit is an absolute position, so a repeated or late limit
is harmless. Each piece states its position, so the receiver notices a lost piece.
"""

WINDOW_BYTES = 256 * 1024
"""A client's window of unread bytes. It allows 256 MB/s at 1 ms round trip, and 5 MB/s at 50 ms."""
CHUNK_BYTES = 32 * 1024
"""Maximum bytes in one message. Far less than NATS's 1 MB, so that other messages wait briefly."""
KEEP_ALIVE_S = 10.0
"""Each end sends a keep-alive at least this often."""
SILENT_S = 30.0
"""An end that sends nothing for this long counts as gone."""


class BrokenStreamError(Exception):
    """Bytes were lost on the way, or the peer sent beyond the advertised window."""


class FlowControl:
    """The counters of one end for both directions. `window` limits received bytes not yet read."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._sent = 0
        self._limit = 0
        self._came = 0
        self._taken = 0
        self._announced = window

    # --- sending -----------------------------------------------------------------------------
    def limited(self, upto: int) -> None:
        self._limit = max(self._limit, upto)

    @property
    def room(self) -> int:
        """Return the bytes that one piece may have now."""
        return min(self.room_whole, CHUNK_BYTES)

    @property
    def room_whole(self) -> int:
        """Return the bytes that one datagram may have now. A datagram is never split."""
        return self._limit - self._sent

    def sending(self, size: int) -> int:
        at, self._sent = self._sent, self._sent + size
        return at

    # --- receiving ---------------------------------------------------------------------------
    @property
    def upto(self) -> int:
        """Return the limit to announce to the other end."""
        self._announced = self._taken + self._window
        return self._announced

    def came(self, at: int, size: int, *, may_miss: bool = False) -> None:
        """Count a received piece. With `may_miss` (datagrams), earlier pieces may be missing.

        Raises:
            BrokenStreamError: an earlier piece is missing, the piece overlaps an earlier piece, or
                the window is exceeded.
        """
        if not size:
            return
        if at != self._came and not (may_miss and at > self._came):
            msg = "bytes were lost on the way; open the stream again"
            raise BrokenStreamError(msg)
        self._taken += at - self._came  # lost bytes occupy no window
        self._came = at + size
        if self._came > self._announced:
            msg = "too many bytes came; the other end does not keep to its limit"
            raise BrokenStreamError(msg)

    def took(self, size: int) -> bool:
        """Count bytes that were read; return True if the new limit should be announced."""
        self._taken += size
        return self._taken + self._window - self._announced >= self._window // 2
