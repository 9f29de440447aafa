"""Caches the volumes of the fleet, as the watch of the bucket `vm` delivers them."""

from collections import Counter
from collections.abc import Container, Iterator, KeysView

from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.schemas.records import read_volume
from virtbus.schemas.subjects import volume_record


class Volumes:
    """The volumes by key. The cache may lag; each decision is then a CAS write."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredVolume] = {}
        self._seen = 0
        """The highest revision of a volume that the watch has delivered."""
        self._in_namespace: Counter[str] = Counter()
        self.deleting: set[str] = set()
        """The keys of volumes that are being deleted."""
        self._keys: dict[str, str] = {}
        """By uid: the key of the volume."""

    # --- input ----------------------------------------------------------------------------
    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a volume from the watch; raises VirtbusError if it cannot be read."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self._store(key, StoredVolume(read_volume(key, value), revision))

    def apply(self, held: StoredVolume) -> None:
        """Process our own write, unless the watch has delivered it or a later message."""
        if held.revision > self._seen:
            self._store(volume_record(held.record.namespace, held.record.name), held)

    def purge(self, key: str, revision: int) -> None:
        """Process a purge marker from the watch."""
        self._seen = max(self._seen, revision)
        known = self._stored.get(key)
        if known is None or known.revision < revision:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Drop a volume that a complete list does not contain."""
        known = self._stored.pop(key, None)
        self.deleting.discard(key)
        if known is not None:
            self._in_namespace[known.record.namespace] -= 1
            self._keys.pop(known.record.uid, None)

    def _store(self, key: str, held: StoredVolume) -> None:
        if key not in self._stored:
            self._in_namespace[held.record.namespace] += 1
        self._keys[held.record.uid] = key
        (self.deleting.add if held.record.deleting else self.deleting.discard)(key)
        self._stored[key] = held

    # --- answers --------------------------------------------------------------------------
    def keys(self) -> KeysView[str]:
        return self._stored.keys()

    def at(self, key: str) -> StoredVolume | None:
        """Return a volume by its key."""
        return self._stored.get(key)

    def get(self, namespace: str, name: str) -> StoredVolume | None:
        """Return a volume by name."""
        return self._stored.get(volume_record(namespace, name))

    def of_uid(self, uid: str) -> StoredVolume | None:
        """Return a volume by uid."""
        return self._stored.get(self._keys.get(uid, ""))

    def count(self, namespace: str | None = None) -> int:
        """Return the number of volumes of a namespace; None: of all."""
        return len(self._stored) if namespace is None else self._in_namespace[namespace]

    def held_outside(self, vms: Container[str]) -> Iterator[StoredVolume]:
        """Yield the volumes with a holder that is not among the uids `vms`."""
        for held in self._stored.values():
            if held.record.holder and held.record.holder not in vms:
                yield held

    def listed(self, namespace: str | None, labels: dict[str, str]) -> list[StoredVolume]:
        """Return the volumes of a namespace (None: all) with the labels, by namespace and name."""
        found = [
            held
            for held in self._stored.values()
            if (namespace is None or held.record.namespace == namespace)
            and all(held.record.labels.get(key) == text for key, text in labels.items())
        ]
        return sorted(found, key=StoredVolume.order)
