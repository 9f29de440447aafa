"""Caches the volumes of the fleet, from the watch of the bucket `vm`.

`Volumes.snapshots` caches the snapshots of VMs and volumes.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping

from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.snapshots import Snapshots
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.schemas.records import read_volume
from virtbus.schemas.subjects import volume_record
from virtbus.schemas.volume import FillState, VolumeRecord


class Volumes(NamedRecords[VolumeRecord]):
    """The volumes by key and uid, and the keys of volumes that are deleted, filled or moved."""

    def __init__(self) -> None:
        super().__init__(read_volume, lambda one: volume_record(one.namespace, one.name))
        self.snapshots = Snapshots()
        self.deleting: set[str] = set()
        """The keys of volumes that are being deleted."""
        self.filling: set[str] = set()
        """The keys of volumes whose content is being copied."""
        self.moving: set[str] = set()
        """The keys of volumes whose move is not complete, or not cleaned up."""
        self._bytes_in: Counter[str] = Counter()
        """By namespace: the total size of its volumes."""
        self._keys: dict[str, str] = {}
        """By uid: the key of the volume."""

    def forget(self, key: str) -> None:
        """Drop a volume that was purged, or that a complete list does not contain."""
        known = self.at(key)
        self.deleting.discard(key)
        self.filling.discard(key)
        self.moving.discard(key)
        if known is not None:
            self._keys.pop(known.record.uid, None)
            self._bytes_in[known.record.namespace] -= known.record.spec.size
        super().forget(key)

    def _store(self, key: str, held: StoredVolume) -> None:
        super()._store(key, held)
        self._keys[held.record.uid] = key
        self._bytes_in[held.record.namespace] += held.record.spec.size
        if held.record.deleting:
            self.deleting.add(key)
        if held.record.fill is not None and held.record.fill.state is FillState.FILLING:
            self.filling.add(key)
        if held.record.has_open_move:
            self.moving.add(key)

    # --- answers --------------------------------------------------------------------------
    def get(self, namespace: str, name: str) -> StoredVolume | None:
        return self.at(volume_record(namespace, name))

    def size_bytes(self, namespace: str | None = None) -> int:
        """Return the total size of a namespace's volumes; None: of all namespaces."""
        return self._bytes_in.total() if namespace is None else self._bytes_in[namespace]

    def of_uid(self, uid: str) -> StoredVolume | None:
        return self.at(self._keys.get(uid, ""))

    def held_outside(self, vms: Container[str]) -> Iterator[tuple[str, StoredVolume]]:
        """Yield each holder whose uid is not in `vms`, with its volume."""
        for held in self._stored.values():
            for vm in held.record.holders:
                if vm not in vms:
                    yield vm, held

    def listed(
        self, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> list[StoredVolume]:
        """Return the volumes of a namespace (None: all) with the labels, by namespace and name."""
        wanted = (labels or {}).items()
        found = super().listed(namespace)
        return [held for held in found if wanted <= held.record.labels.items()]
