"""Refuses new operations when too many are open, or when the bus is too full."""

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.schemas.errors import Code, VirtbusError


class OperationRoom:
    """Limits the number of operations."""

    def __init__(self, fleet: Fleet, storage: BusStorageGuard, quota: Quota) -> None:
        self._fleet = fleet
        self._storage = storage
        self._quota = quota

    def refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new operation would exceed a quota, or the bus space kept free for VMs.

        Only open operations count: `OperationSweep` removes the oldest ended operations.
        """
        self._storage.refuse_create("operations", OBJECTS_UNTIL_FULL)
        if why := self._quota.full(self._fleet.operations, namespace, "open operations"):
            message = f"{why}; repeat when one has ended, or cancel one"
            raise VirtbusError(Code.EXHAUSTED, "operation_quota", message, after_ms=10_000)
