"""Keeps the sizes of volumes' data from a pool's server, with their age.

A *place* has one volume's data: an export, a unit, an image or a file (ADR 0060).
"""

from collections.abc import Mapping


class KnownSizes:
    """The last reported size of each place."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        """The last size of each place in bytes, by the volume's key in the pool's settings."""
        self._confirmed_ns: dict[str, int] = {}
        self._asked_ns = 0

    def confirm(self, sizes: Mapping[str, int], now_ns: int) -> None:
        """Note the sizes in the server's answer at `now_ns` to a request for all places."""
        self._asked_ns = now_ns
        self.bytes |= sizes
        self._confirmed_ns |= dict.fromkeys(sizes, now_ns)

    def confirmed_ns(self, *, away: bool) -> int:
        """Return the time in ns of the oldest outdated size's confirmation, or 0.

        A size is outdated if the last request did not confirm the size. While the server is `away`,
        all sizes are outdated.
        """
        times = self._confirmed_ns.values()
        return min((at for at in times if away or at < self._asked_ns), default=0)
