"""Compares a list of a bucket with the cache, and finds values that are missing or outdated.

Revisions only rise, so a cache ignores a value with a lower revision. But a bus that was restored
in place continues at a lower revision. On such a bus, a list proves that a cached value is
outdated.
"""

from collections.abc import Iterable, Mapping


class BucketList:
    """The last list of one bucket. Names are keys, or the uids of VMs."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        """The revisions of cached values that the list has not contained yet, by name."""
        self._older = False
        """True if the list has a value of a lower revision than the cache."""
        self._all = False
        """True if the list also replaces cached values of the same revision.

        After a restore, another value may have the same revision.
        """

    def begin(self, cached: Mapping[str, int]) -> None:
        """Begin a list. `cached` has the revisions of cached values.

        With the revision 0, any value in the list replaces the cached value.
        """
        self._missing = dict(cached)
        self._all, self._older = self._older, False

    @property
    def incomplete(self) -> bool:
        """Return True while the list still lacks a cached value."""
        return bool(self._missing)

    def outdated(self, names: Iterable[str], revision: int) -> list[str]:
        """Return the `names` whose cached value is replaced by a listed value of `revision`."""
        found = []
        for name in self._missing.keys() & names:
            cached = self._missing.pop(name)
            self._older |= revision < cached
            if revision < cached + self._all:
                found.append(name)
        return found

    def end(self) -> list[str]:
        """Return the names of cached values that the bus does not have."""
        missing, self._missing = list(self._missing), {}
        return missing

    @property
    def repeat(self) -> bool:
        """Return True if the bus was restored, and the next list has to replace all values."""
        return self._older and not self._all
