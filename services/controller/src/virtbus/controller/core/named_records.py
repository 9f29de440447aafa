"""Caches the records of one kind of named objects, as a watch delivers them."""

from collections import Counter
from collections.abc import Callable, ItemsView, KeysView
from typing import Generic

from virtbus.controller.core.vm_keys import NamedT, Stored


class NamedRecords(Generic[NamedT]):
    """The records by key. The cache may lag, so a decision needs a CAS write or a new read."""

    def __init__(
        self, read: Callable[[str, bytes], NamedT], key_of: Callable[[NamedT], str]
    ) -> None:
        self._read = read
        self._key_of = key_of
        self._stored: dict[str, Stored[NamedT]] = {}
        self._seen = 0
        """The highest revision that the watch delivered since its complete list began."""
        self._in_namespace: Counter[str] = Counter()

    # --- input ----------------------------------------------------------------------------
    def begin_list(self) -> None:
        """Forget the highest revision, because the next complete list may have lower ones."""
        self._seen = 0

    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a record from the watch; raise VirtbusError if it cannot be read."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self._store(key, Stored(self._read(key, value), revision))

    def apply(self, held: Stored[NamedT]) -> None:
        """Process our own write, unless the watch has already reached its revision."""
        if held.revision > self._seen:
            self._store(self._key_of(held.record), held)

    def purge(self, key: str, revision: int) -> None:
        """Process a purge marker, from the watch or our own write."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Drop a record that was purged, or that a complete list does not contain."""
        known = self._stored.pop(key, None)
        if known is not None:
            self._in_namespace[known.record.namespace] -= 1

    def _store(self, key: str, held: Stored[NamedT]) -> None:
        self.forget(key)
        self._in_namespace[held.record.namespace] += 1
        self._stored[key] = held

    # --- answers --------------------------------------------------------------------------
    def keys(self) -> KeysView[str]:
        return self._stored.keys()

    def items(self) -> ItemsView[str, Stored[NamedT]]:
        return self._stored.items()

    def at(self, key: str) -> Stored[NamedT] | None:
        return self._stored.get(key)

    def count(self, namespace: str | None = None) -> int:
        """Return the number of records of a namespace; None: of all namespaces."""
        return len(self._stored) if namespace is None else self._in_namespace[namespace]

    def listed(self, namespace: str | None) -> list[Stored[NamedT]]:
        """Return the records of a namespace (None: all), by namespace and name."""
        found = [
            held
            for held in self._stored.values()
            if namespace is None or held.record.namespace == namespace
        ]
        return sorted(found, key=Stored.order)
