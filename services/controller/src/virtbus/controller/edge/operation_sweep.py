"""Removes old operations, and ends operations of forgotten nodes, as a leader task (ADR 0048)."""

import asyncio
import logging
from collections.abc import Awaitable

from virtbus.bus.client.ports import Bus, EntryKind
from virtbus.bus.errors import BusError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.operation_surplus import needed, surplus
from virtbus.controller.core.operations import StoredOperation, StoredStatus, expired
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

ROUND_S = 30.0


class OperationSweep:
    """Sweeps in rounds. The sweep is level-triggered: a crash leaves work for the next round."""

    def __init__(self, bus: Bus, fleet: Fleet, keep_s: float, quota: Quota) -> None:
        self._bus = bus
        self._fleet = fleet
        self._keep_s = keep_s
        self._quota = quota
        self._writes = OperationWrites(bus)

    async def run(self, tenure: LeaderTerm) -> None:
        """Sweep while the fleet lease is held."""
        while True:
            await self.round(tenure)
            await asyncio.sleep(ROUND_S)

    async def round(self, tenure: LeaderTerm) -> None:
        """Remove old operations and orphan statuses; fail operations of forgotten nodes."""
        operations, now_ns = self._fleet.operations, self._bus.sources.time_ns()
        is_needed = needed(self._fleet)
        for held in operations.all():
            tenure.check()
            seen = operations.status_of(held.record)
            if not expired(seen.status, now_ns, self._keep_s):
                await self._guarded(self._fail_forgotten(held, seen))
            elif not is_needed(held.record):
                await self._guarded(self._writes.remove(held))
        for held in surplus(self._fleet, self._quota, now_ns):
            tenure.check()
            await self._guarded(self._writes.remove(held))
        for seen in operations.statuses():
            known = operations.of_id(seen.status.id)
            if known is None and expired(seen.status, now_ns, self._keep_s):
                tenure.check()
                await self._guarded(self._writes.remove_status(seen))

    async def _fail_forgotten(self, held: StoredOperation, seen: StoredStatus) -> None:
        if not seen.status.ended and await self._forgotten(held.record.node):
            message = f"node {held.record.node} was forgotten before the operation ended"
            error = VirtbusError(Code.CONFLICT, "node_forgotten", message)
            await self._writes.fail(held.record, error.body)

    async def _forgotten(self, node: str) -> bool:
        """Return True if the node has no heartbeat and, on the bus, no join record."""
        if node in self._fleet.nodes:
            return False
        entry = await self._bus.get(subjects.join_nonce(node))
        return entry is None or entry.kind is EntryKind.PURGE

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except BusError as error:  # also a conflict, if another controller was first
            log.info("operation swept later: %s", error, extra={"code": "operation_sweep"})
