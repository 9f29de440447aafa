"""Who may still send how much: the bookkeeping of one end of a stream (ADR 0023). No I/O.

Both directions count bytes from 0. Limits are absolute, so a repeated or late one does no harm, and
each piece says where it begins, so a lost one is seen.
"""

WINDOW_BYTES = 256 * 1024
"""What a client lets come unread: a connection's 1 ms at 256 MB/s, or 50 ms at 5 MB/s."""
CHUNK_BYTES = 32 * 1024
"""The most in one message: far below the bus's 1 MB, and others' messages need not wait long."""
SIGN_S = 10.0
"""Each end says at least this often that it is there."""
SILENT_S = 30.0
"""Whoever is not heard of for this long is gone."""


UNCOUNTED_BYTES = 1024 * 1024
"""What may come unread of an end that keeps no count (0.1.0)."""


class BrokenStreamError(Exception):
    """Bytes were lost on the way, or more came than may."""


class Flow:
    """One end's counts. `window` is how much may come unread.

    `counted` False: the other end keeps no count, takes all, and says nothing of gaps.
    """

    def __init__(self, window: int = UNCOUNTED_BYTES, *, counted: bool = True) -> None:
        self._counted = counted
        self._window = window
        self._sent = 0
        self._limit: int | None = 0 if counted else None
        self._came = 0
        self._taken = 0
        self._told = window

    # --- what is sent -------------------------------------------------------------------------
    def limited(self, upto: int) -> None:
        """The other end takes bytes up to this one."""
        if self._limit is not None:
            self._limit = max(self._limit, upto)

    @property
    def room(self) -> int:
        """How many bytes may be sent now, in one piece."""
        left = CHUNK_BYTES if self._limit is None else self._limit - self._sent
        return min(left, CHUNK_BYTES)

    @property
    def room_whole(self) -> int:
        """The same for a datagram, which is not cut."""
        return 65_535 if self._limit is None else self._limit - self._sent

    def sending(self, size: int) -> int:
        """Count a piece; returns where it begins."""
        at, self._sent = self._sent, self._sent + size
        return at

    # --- what comes ---------------------------------------------------------------------------
    @property
    def upto(self) -> int:
        """The limit to tell the other end."""
        self._told = self._taken + self._window
        return self._told

    def came(self, at: int, size: int, *, may_miss: bool = False) -> None:
        """Count a piece that came.

        Raises:
            BrokenStreamError: some before it is missing, or it is more than may come.
        """
        if not size:
            return
        if not self._counted:
            at, self._told = self._came, self._taken + self._window
        if at != self._came and not (may_miss and at > self._came):
            msg = "some of it was lost on the way; open it again"
            raise BrokenStreamError(msg)
        self._taken += at - self._came  # what is lost takes no room
        self._came = at + size
        if self._came > self._told:
            msg = "more came than may; the other end does not keep to its limit"
            raise BrokenStreamError(msg)

    def took(self, size: int) -> bool:
        """Count bytes that were read; True when the new limit is worth telling."""
        self._taken += size
        return self._counted and self._taken + self._window - self._told >= self._window // 2
