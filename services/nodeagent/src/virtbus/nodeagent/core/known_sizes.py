"""Keeps the sizes of a pool's places that its server has reported, with their age (ADR 0060)."""

from collections.abc import Mapping


class KnownSizes:
    """The last size of each place, if its server has ever reported one."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        """By volume."""
        self._confirmed_ns: dict[str, int] = {}
        self._asked_ns = 0

    def confirm(self, sizes: Mapping[str, int], now_ns: int) -> None:
        """Note the answers to a question about all places."""
        self._asked_ns = now_ns
        self.bytes |= sizes
        self._confirmed_ns |= dict.fromkeys(sizes, now_ns)

    def confirmed_ns(self, *, away: bool) -> int:
        """Return when the oldest size was confirmed that the last question did not confirm.

        0 means that there is none. A server that is `away` confirms none.
        """
        times = self._confirmed_ns.values()
        return min((at for at in times if away or at < self._asked_ns), default=0)
