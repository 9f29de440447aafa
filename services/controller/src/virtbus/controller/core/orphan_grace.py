"""Remembers when a sweep first saw each orphan, so that the sweep removes only old orphans.

Times are on this process's monotonic clock. Timestamps of the stream come from a host's clock. If
that clock were an hour off, a sweep would act at once, or an hour late (F27).
"""

from collections.abc import Mapping


class OrphanGrace:
    """The time since which each key has been an orphan. A new revision of the key restarts it."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int], float] = {}

    def due(self, found: Mapping[str, int], now_s: float, grace_s: float) -> list[str]:
        """Return the keys that have been orphans at the same revision for `grace_s`.

        `found` has the revisions of all orphans of this sweep, by key. Other keys are forgotten.
        """
        self._since_s = {one: self._since_s.get(one, now_s) for one in found.items()}
        return [key for (key, _), since_s in self._since_s.items() if now_s - since_s >= grace_s]
