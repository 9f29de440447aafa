"""The grace of a sweep: orphans, and when each was first seen.

The time counts on the sweeper's own monotonic clock. The stream's times depend on a host's clock:
if it is an hour off, a sweep would act at once, or an hour late (F27).
"""

from collections.abc import Mapping


class OrphanGrace:
    """Orphans by key and revision; a change of either restarts the grace."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int], float] = {}

    def due(self, found: Mapping[str, int], now_s: float, grace_s: float) -> list[str]:
        """Return the keys of `found` (key → revision) seen for `grace_s`; forget all others.

        `found` contains all orphans that this sweep sees.
        """
        self._since_s = {one: self._since_s.get(one, now_s) for one in found.items()}
        return [key for (key, _), since_s in self._since_s.items() if now_s - since_s >= grace_s]
