"""Flow control: the counters of one end of a stream (ADR 0023). No I/O.

Both directions count bytes from 0. Limits are absolute, so a repeated or late one is harmless. Each
piece states its position, so a lost one is noticed.
"""

WINDOW_BYTES = 256 * 1024
"""A client's window of unread bytes: 1 ms of a connection at 256 MB/s, or 50 ms at 5 MB/s."""
CHUNK_BYTES = 32 * 1024
"""The most bytes in one message: far below the bus' 1 MB, so others' messages do not wait long."""
SIGN_S = 10.0
"""Each end sends a keep-alive at least this often."""
SILENT_S = 30.0
"""An end that is silent for this long is gone."""


class BrokenStreamError(Exception):
    """Bytes were lost on the way, or the peer sent beyond the advertised window."""


class FlowControl:
    """The counters of one end. `window` is the limit of unread bytes."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._sent = 0
        self._limit = 0
        self._came = 0
        self._taken = 0
        self._told = window

    # --- sending -----------------------------------------------------------------------------
    def limited(self, upto: int) -> None:
        """Record the position up to which the other end accepts bytes."""
        self._limit = max(self._limit, upto)

    @property
    def room(self) -> int:
        """Return how many bytes may be sent now in one piece."""
        return min(self.room_whole, CHUNK_BYTES)

    @property
    def room_whole(self) -> int:
        """Return how many bytes a datagram may have now; it is not split."""
        return self._limit - self._sent

    def sending(self, size: int) -> int:
        """Count a piece that is sent; return its position."""
        at, self._sent = self._sent, self._sent + size
        return at

    # --- receiving ---------------------------------------------------------------------------
    @property
    def upto(self) -> int:
        """Return the limit to announce to the other end."""
        self._told = self._taken + self._window
        return self._told

    def came(self, at: int, size: int, *, may_miss: bool = False) -> None:
        """Count a piece that was received.

        Raises:
            BrokenStreamError: an earlier piece is missing, or the window is exceeded.
        """
        if not size:
            return
        if at != self._came and not (may_miss and at > self._came):
            msg = "some of it was lost on the way; open it again"
            raise BrokenStreamError(msg)
        self._taken += at - self._came  # lost bytes occupy no window
        self._came = at + size
        if self._came > self._told:
            msg = "more came than may; the other end does not keep to its limit"
            raise BrokenStreamError(msg)

    def took(self, size: int) -> bool:
        """Count bytes that were read; return True if the new limit should be announced."""
        self._taken += size
        return self._taken + self._window - self._told >= self._window // 2
