"""What was found without an owner, and for how long: the grace of a sweep.

Counted on the sweeper's own monotonic clock from the sweep that found it first. The stream's times
are no help: a host whose clock is an hour off would sweep at once, or not for an hour (F27).
"""

from collections.abc import Mapping


class Suspects:
    """Orphans by key and revision; a change of either begins the grace anew."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int], float] = {}

    def due(self, found: Mapping[str, int], now_s: float, grace_s: float) -> list[str]:
        """The keys of `found` (key → revision) that were found so for `grace_s`; forget the rest.

        `found` is all that this sweep sees.
        """
        self._since_s = {one: self._since_s.get(one, now_s) for one in found.items()}
        return [key for (key, _), since_s in self._since_s.items() if now_s - since_s >= grace_s]
