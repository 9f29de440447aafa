"""Remembers when a sweep first saw each orphan, so that the sweep removes only old orphans.

Times are on this process's monotonic clock. The stream's timestamps depend on a host's clock. If
that clock were an hour off, a sweep would act at once, or an hour late (F27).
"""

from collections.abc import Mapping


class OrphanGrace:
    """The time at which each orphan was first seen. A new revision of the key restarts the time."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int], float] = {}

    def due(self, found: Mapping[str, int], now_s: float, grace_s: float) -> list[str]:
        """Return the keys that have been orphans at one revision for `grace_s`.

        `found` (key → revision) has all orphans of this sweep. Other keys are forgotten.
        """
        self._since_s = {one: self._since_s.get(one, now_s) for one in found.items()}
        return [key for (key, _), since_s in self._since_s.items() if now_s - since_s >= grace_s]
