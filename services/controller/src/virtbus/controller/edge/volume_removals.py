"""Removes deleted volumes as a leader task: first their data on nodes, then their records."""

import asyncio
import logging
from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import has_data_on_node
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.core.volume_moves import left_behind
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.moved_files import MovedFiles
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import VolumeRelease, VolumeReleased
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ROUND_S = 5.0
SETTLE_S = 0.2
"""Delay after `wake`, so that one round handles concurrent changes."""
ASK_S = 5.0
AT_ONCE = 16
"""Number of concurrent removals. A removal on a silent node takes ASK_S."""


class VolumeRemovals:
    """Completes deletes of volumes. After a crash, the next round continues."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents, files: MovedFiles) -> None:
        self._bus = bus
        self._files = files
        self._fleet = fleet
        self._events = events
        self._writes = VolumeWrites(bus)
        self._operations = OperationWrites(bus)
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Start a round soon if a volume is being deleted."""
        if self._fleet.volumes.deleting:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        while True:
            due = sorted(self._fleet.volumes.deleting)
            for first in range(0, len(due), AT_ONCE):
                tenure.check()
                async with asyncio.TaskGroup() as group:
                    for key in due[first : first + AT_ONCE]:
                        group.create_task(self._remove(key))
            if await wait_for_event(self._wake, ROUND_S):
                await asyncio.sleep(SETTLE_S)
            self._wake.clear()

    async def _remove(self, key: str) -> None:
        held = self._fleet.volumes.at(key)
        if held is None or not held.record.deleting:
            return
        try:
            if await self._prevent_fills(held.record) or await self._end_operations(
                held.record.uid
            ):
                return  # the next status of the fill wakes this task
            await self._release(held)
            revision = await self._writes.end(held)
        except ConflictError:
            return  # another controller changed the volume first
        except (BusError, VirtbusError) as error:
            extra = {"code": "volume_remains", "uid": held.record.uid}
            log.info("removal of %s will be retried: %s", held.record.name, error, extra=extra)
            return
        self._events.named(EventKind.VOLUME_DELETED, held.record, revision, "")
        extra = {"code": "volume_deleted", "uid": held.record.uid}
        log.info("deleted volume %s", held.record.name, extra=extra)

    async def _prevent_fills(self, record: VolumeRecord) -> bool:
        """Prevent the operations of the volume's move or fill; return True while a fill runs.

        A task that read the volume before the delete may still create these operations, and a fill
        would write data after the removal. An operation that already runs is cancelled.
        """
        move, fill = record.move, record.fill
        ids = [] if move is None else [(move.source, move.export), (move.target, move.fill)]
        if fill is not None and fill.operation and record.node:
            ids.append((record.node, fill.operation))
        begun = False
        for node, id_ in ids:
            held = await self._operations.prevent(node, id_)
            if held is not None and not (await self._operations.status(held.record)).status.ended:
                with suppress(VirtbusError):  # the operation can no longer be cancelled
                    await self._operations.cancel(id_)
                begun = begun or held.record.kind == "fill"
        return begun

    async def _end_operations(self, uid: str) -> bool:
        """Cancel the operations of the volume; return True while one of them is a fill.

        Fills must end before the release. After a restart, imaged does not remember the release,
        and an open fill would write the data again.
        """
        operations = self._fleet.operations.open_of(uid)
        for operation in operations:
            if not operation.record.cancel:
                with suppress(VirtbusError):  # the operation can no longer be cancelled
                    await self._operations.cancel(operation.record.id)
        return any(one.record.kind == "fill" for one in operations)

    async def _release(self, held: StoredVolume) -> None:
        """Make the volume's nodes remove its data.

        Raises BusError, and the errors of imaged.
        """
        record = held.record
        if not has_data_on_node(record):
            return
        move = record.move if record.has_open_move else None
        places = [(record.node, ref_of(record))]
        if move is not None:
            other = left_behind(record, move)
            places += [other] if self._fleet.has_node(other[0]) else []
            await self._files.drop(record, move)
        for node, ref in places:
            subject = subjects.rpc(node, "imaged", "volume-release")
            ask = VolumeRelease(ref=ref)
            validate(VolumeReleased, await self._bus.request(subject, ask, timeout_s=ASK_S))
