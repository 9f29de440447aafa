"""Caches the image names on the bus, as the watch of the bucket `vm` delivers them."""

from collections import Counter
from collections.abc import KeysView
from typing import NamedTuple

from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.records import read_image_name
from virtbus.schemas.subjects import image_name


class StoredImageName(NamedTuple):
    """An image name with its revision, as a CAS needs it."""

    record: ImageNameRecord
    revision: int

    def order(self) -> tuple[str, str]:
        return (self.record.namespace, self.record.name)


class ImageNames:
    """The image names by key. The cache may lag: a name that it has is read again."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredImageName] = {}
        self._seen = 0
        """The highest revision of an image name that the watch has delivered."""
        self._in_namespace: Counter[str] = Counter()

    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a name from the watch; raises VirtbusError if it cannot be read."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self._store(key, StoredImageName(read_image_name(key, value), revision))

    def apply(self, held: StoredImageName) -> None:
        """Process our own write, unless the watch has delivered it or a later message."""
        if held.revision > self._seen:
            self._store(image_name(*held.order()), held)

    def purge(self, key: str, revision: int) -> None:
        """Process a purge marker, from the watch or of our own."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Drop a name that a complete list does not contain."""
        known = self._stored.pop(key, None)
        if known is not None:
            self._in_namespace[known.record.namespace] -= 1

    def _store(self, key: str, held: StoredImageName) -> None:
        if key not in self._stored:
            self._in_namespace[held.record.namespace] += 1
        self._stored[key] = held

    # --- answers --------------------------------------------------------------------------
    def has(self, key: str) -> bool:
        """Return True if the name of this key was read."""
        return key in self._stored

    def keys(self) -> KeysView[str]:
        return self._stored.keys()

    def count(self, namespace: str | None = None) -> int:
        """Return the number of names of a namespace; None: of all."""
        return len(self._stored) if namespace is None else self._in_namespace[namespace]

    def listed(self, namespace: str | None) -> list[StoredImageName]:
        """Return the names of a namespace (None: all), by namespace and name."""
        found = [
            held
            for held in self._stored.values()
            if namespace is None or held.record.namespace == namespace
        ]
        return sorted(found, key=StoredImageName.order)
