"""Completes snapshots after their operations; removes deleted snapshots. Leader task (ADR 0054)."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.snapshot_changes import completed, ref_of_snapshot
from virtbus.controller.core.snapshot_users import users_of
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredSnapshot
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.controller.edge.snapshot_orphans import SnapshotOrphans
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.snapshot_api import SnapshotAdopt
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotReleased
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ROUND_S = 5.0
SETTLE_S = 0.02
"""Delay after `wake`, so that one round handles simultaneous changes. The delay is short, because a
clone waits until its snapshot is ready."""
ASK_S = 5.0
AT_ONCE = 16
"""Number of snapshots that are handled at once. A silent node occupies one of these for ASK_S."""
ALONE_S = 60.0
"""After this time, a snapshot without an operation is completed if its node has the data, and
removed if not.

The time counts from the leader's first look at the snapshot, because the clock of the controller
that made the snapshot may be wrong.
"""


class SnapshotSweep:
    """Sweeps in rounds. The sweep is level-triggered: a crash leaves work for the next round."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._snapshots = fleet.volumes.snapshots
        self._fleet = fleet
        self._events = events
        self._writes = SnapshotWrites(bus)
        self._operations = OperationWrites(bus)
        self._orphans = SnapshotOrphans(bus, self._snapshots)
        self._wake = asyncio.Event()
        self._alone_s: dict[str, float] = {}
        """By uid of a snapshot without an operation: the loop's time of the first look."""

    def wake(self) -> None:
        """Start a round if snapshots are incomplete or being deleted."""
        if self._snapshots.open:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Sweep while the fleet lease is held."""
        while True:
            due = sorted(self._snapshots.open)
            if not due:
                self._alone_s.clear()
            for first in range(0, len(due), AT_ONCE):
                tenure.check()
                async with asyncio.TaskGroup() as group:
                    for key in due[first : first + AT_ONCE]:
                        group.create_task(self._guarded(key))
            if await wait_for_event(self._wake, ROUND_S):
                await asyncio.sleep(SETTLE_S)
            self._wake.clear()

    async def _guarded(self, key: str) -> None:
        held = self._snapshots.at(key)
        if held is None or key not in self._snapshots.open:
            return
        try:
            await (self._remove(held) if held.record.deleting else self._complete(held))
        except ConflictError:
            return  # the snapshot changed meanwhile
        except (BusError, VirtbusError) as error:
            extra = {"code": "snapshot_waits", "uid": held.record.uid}
            log.info("snapshot %s is continued later: %s", held.record.name, error, extra=extra)

    async def _complete(self, held: StoredSnapshot) -> None:
        """Mark the snapshot as ready if its operation succeeded, as deleting if it failed."""
        operation = await self._operations.latest(held.record.uid)
        if operation is None:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._alone_s.setdefault(held.record.uid, now_s) > ALONE_S:
                await self._settle(held)
            return
        status = (await self._operations.status(operation.record)).status
        if status.ended:
            after = completed(held.record, status)
            change = {name: getattr(after, name) for name in ("ready", "size_bytes", "deleting")}
            kind = EventKind.SNAPSHOT_READY if after.ready else EventKind.SNAPSHOT_DELETING
            await self._change(held, change, kind)

    async def _settle(self, held: StoredSnapshot) -> None:
        """Complete a snapshot without an operation if its node has its data; delete it if not.

        The operation is missing if a create crashed between its two writes, or if the bus was
        restored from a backup. A snapshot that keeps the replaced disks of a restore stays: the
        node may still work on the restore.
        """
        record = held.record
        want = SnapshotAdopt(
            name=record.name, namespace=record.namespace, uid=record.uid, node=record.node
        )
        try:
            found = await self._orphans.find(want)
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND or record.replaced_by:
                raise
            await self._change(held, {"deleting": True}, EventKind.SNAPSHOT_DELETING)
            return
        change = {"ready": True, "size_bytes": found.size_bytes}
        await self._change(held, change, EventKind.SNAPSHOT_READY)

    async def _change(
        self, held: StoredSnapshot, change: Mapping[str, object], kind: EventKind
    ) -> None:
        after = await self._writes.replace(held, held.record.model_copy(update=change))
        self._snapshots.apply(after)
        self._events.named(kind, after.record, after.revision, "")
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s", kind, held.record.name, extra=extra)

    async def _remove(self, held: StoredSnapshot) -> None:
        """Remove the data, then the record, after the operation that makes the data has ended.

        A missing operation is prevented: a slow create can no longer write it.
        """
        operation = None
        with suppress(UnreadableValueError):  # the node cannot read the operation either
            operation = await self._operations.prevent(held.record.node, held.record.uid)
        if operation is not None:
            status = (await self._operations.status(operation.record)).status
            if not status.ended:
                with suppress(VirtbusError):  # the operation is in its final step, and ends soon
                    await self._operations.cancel(operation.record.id)
                return
        if any(users_of(held.record.uid, self._fleet)):
            return  # a copy of the snapshot began during the delete request: wait for its end
        if not held.record.lost:
            subject = subjects.rpc(held.record.node, "imaged", "snapshot-release")
            ask = SnapshotRelease(ref=ref_of_snapshot(held.record))
            validate(SnapshotReleased, await self._bus.request(subject, ask, timeout_s=ASK_S))
        revision = await self._writes.end(held)
        record = held.record
        self._snapshots.purge(subjects.snapshot_record(record.namespace, record.name), revision)
        self._events.named(EventKind.SNAPSHOT_DELETED, record, revision, "")
        log.info("deleted snapshot %s", record.name, extra={"code": "snapshot_deleted"})
