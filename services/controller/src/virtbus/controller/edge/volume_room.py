"""Refuses new and larger volumes that exceed a quota or a pool, or that the bus cannot store."""

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.volume_quota import VolumeQuota
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.schemas.volume import VolumeRecord


class VolumeRoom:
    """The limits of new and larger volumes."""

    def __init__(self, fleet: Fleet, storage: BusStorageGuard, quota: VolumeQuota) -> None:
        self._fleet = fleet
        self._storage = storage
        self._quota = quota

    def refuse_more(self, *new: VolumeRecord) -> None:
        """Raise 429 if new volumes exceed a quota, or if the bus is nearly full.

        The last space on the bus is kept for VMs.
        """
        self._storage.refuse_create("volumes", OBJECTS_UNTIL_FULL)
        self._quota.refuse_new(self._fleet.volumes, new)

    def refuse_growth(self, record: VolumeRecord, size_bytes: int) -> None:
        """Raise 429 if a quota or the volume's pool does not allow the size `size_bytes`."""
        self._quota.refuse_growth(self._fleet.volumes, record, size_bytes)
        self._fleet.pools.refuse_growth(record, size_bytes)
