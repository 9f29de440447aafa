"""Begins the operations that fill volumes, and stores their results (ADR 0053).

A create writes the volume's record, which names the operation, and then the operation. After a
crash in between, the volume is Filling without an operation, and the leader writes the operation.
"""

import asyncio
import logging
from contextlib import suppress

from virtbus.bus.client.owners import check_owner
from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core import exports, resting, volume_fills
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.pools import needs_of, why_not
from virtbus.controller.core.snapshot_changes import not_found as no_snapshot
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import create_step, not_found
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.controller.edge.vm_api import VmApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.api import VmRef
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.operation_api import OperationExport
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.snapshot_api import SnapshotAsk
from virtbus.schemas.volume import FillState, VolumeRecord
from virtbus.schemas.volume_api import VolumeAsk

log = logging.getLogger(__name__)

ROUND_S = 2.0
SETTLE_S = 0.1
"""Delay after `wake`, so that one round handles simultaneous changes."""
GONE = frozenset({"deleted", "id_taken"})


class VolumeFills:
    """Plans and begins the fills of volumes, and stores their results."""

    def __init__(
        self, bus: Bus, fleet: Fleet, events: FleetEvents, room: OperationRoom, vms: VmApi
    ) -> None:
        self._sources = bus.sources
        self._fleet = fleet
        self._events = events
        self._volumes = VolumeWrites(bus)
        self._operations = OperationWrites(bus)
        self._snapshots = SnapshotWrites(bus)
        self._room = room
        self._vms = vms
        self._wake = asyncio.Event()

    # --- requests ---------------------------------------------------------------------------
    async def planned(self, record: VolumeRecord, account: str) -> VolumeRecord:
        """Return a new volume with its fill; an existing volume keeps its stored fill and node.

        Raises:
            VirtbusError: 404: the source does not exist. 403: the account may not use the source.
                429 `operation_quota`: too many operations are open. Also the errors of
                `create_step`, `exports.of_vm`, `resting.running_holder` and `core.volume_fills`.
        """
        there = await self._volumes.latest(record.namespace, record.name)
        if there is not None:
            create_step(there.record, "", record)  # raises if the name belongs to another volume
            known = there.record
            return record.model_copy(
                update={"fill": known.fill, "node": known.node, "bound": known.bound}
            )
        self._room.refuse_more(record.namespace)
        operation, wanted = self._sources.uuid7(), record.spec.source
        if wanted.backup is not None:
            check_owner(account, "")  # a backup's owner is unknown: refuse accounts of bridges
            return volume_fills.of_backup(record, operation)
        if wanted.vm is not None:
            return volume_fills.of_vm(record, await self._disk_of(record, account), operation)
        if wanted.snapshot is not None:
            snapshot = await self._snapshot(record, wanted.snapshot, account)
            return volume_fills.of_snapshot(record, snapshot, operation)
        if wanted.volume is None:
            node = record.node or self._node_for(record)
            return volume_fills.of_image(record, node, operation)
        ask = VolumeAsk(name=wanted.volume, namespace=record.namespace)
        source = await self._volumes.latest(ask.namespace, ask.name)
        if source is None:
            raise not_found(ask)
        check_owner(account, source.record.owner)
        now_s = asyncio.get_running_loop().time()
        holder = self._fleet.show(source.record.holder, now_s)
        running = resting.running_holder(source.record, holder)
        return volume_fills.of_volume(record, source.record, operation, running)

    async def _disk_of(self, record: VolumeRecord, account: str) -> dict[str, object]:
        """Return the fields of `exports.of_vm` for the VM's disk that the volume copies."""
        source = record.spec.source
        ask = OperationExport(namespace=record.namespace, vm=source.vm, disk=source.disk)
        held = await self._vms.find(VmRef(name=source.vm, namespace=record.namespace), account)
        return exports.of_vm(ask, held.record, self._vms.show(held).state)

    async def _snapshot(self, record: VolumeRecord, name: str, account: str) -> SnapshotRecord:
        """Return the snapshot that the volume copies; raise VirtbusError 404, 403."""
        ask = SnapshotAsk(name=name, namespace=record.namespace)
        held = await self._snapshots.latest(ask.namespace, ask.name)
        if held is None:
            raise no_snapshot(ask)
        check_owner(account, held.record.owner)
        return held.record

    def _node_for(self, record: VolumeRecord) -> str:
        nodes = self._fleet.candidates(asyncio.get_running_loop().time())
        needs = needs_of((record,))
        able = [one for one in nodes if not why_not(one.pools, needs)]
        return volume_fills.node_for(able, record.spec.source.image or "", record.spec.size)

    def refuse_more(self, namespace: str) -> None:
        self._room.refuse_more(namespace)

    async def begin(self, held: StoredVolume) -> None:
        """Write the operation of a volume that is Filling, if it does not exist.

        Raises:
            VirtbusError: 410 `deleted`: the operation was removed. 409 `id_taken`: another
                operation has the id.
            BusError: the operation was not written, or the outcome is unknown.
        """
        record, fill = held.record, held.record.fill
        if fill is None or fill.state is not FillState.FILLING or record.deleting:
            return
        wanted = volume_fills.operation_of(record, fill, self._sources.time_ns())
        stored, created = await self._operations.create(wanted)
        self._fleet.operations.apply(stored)
        if created:
            self._events.operation(stored.record, stored.revision)
            extra = {"code": "operation_accepted", "uid": record.uid}
            log.info("fill of %s accepted: %s", record.name, wanted.id, extra=extra)
            await self._end_late(stored.record)

    async def _end_late(self, operation: OperationRecord) -> None:
        """Cancel an operation whose volume was deleted before the operation was written."""
        there = await self._volumes.latest(operation.namespace, operation.name)
        fill = there.record.fill if there is not None and not there.record.deleting else None
        if fill is None or fill.operation != operation.id:
            await self._operations.cancel(operation.id)

    async def begin_soon(self, held: StoredVolume) -> None:
        """Call `begin` and ignore its errors: after an error, the leader writes the operation."""
        with suppress(BusError, VirtbusError):
            await self.begin(held)

    def progress(self, record: VolumeRecord) -> str:
        """Return the progress of a volume's fill, or its failure; "" without an open fill."""
        known = self._fleet.operations.of_id(record.fill.operation) if record.fill else None
        status = self._fleet.operations.status_of(known.record).status if known else None
        return volume_fills.progress(record, status)

    def moving(self, record: VolumeRecord) -> str:
        """Return the progress of the operations of a volume's move; "" without a move."""
        if record.move is None:
            return ""
        for id_ in (record.move.fill, record.move.export):
            known = self._fleet.operations.of_id(id_)
            if known is not None:
                status = self._fleet.operations.status_of(known.record).status
                return volume_fills.of_status(id_, status)
        return "not begun"

    # --- the leader -------------------------------------------------------------------------
    def wake(self) -> None:
        """Start a round if a volume is Filling: its operation may have ended."""
        if self._fleet.volumes.filling:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Write missing operations, and store results of others, while the fleet lease is held."""
        while True:
            for key in sorted(self._fleet.volumes.filling):
                tenure.check()
                await self._guarded(key)
            if await wait_for_event(self._wake, ROUND_S):
                await asyncio.sleep(SETTLE_S)
            self._wake.clear()

    async def _guarded(self, key: str) -> None:
        held = self._fleet.volumes.at(key)
        if held is None or held.record.deleting:
            return
        try:
            await self._one(held)
        except ConflictError:
            return  # another change was first
        except (BusError, VirtbusError) as error:
            extra = {"code": "fill_waits", "uid": held.record.uid}
            log.info("fill of %s will be retried: %s", held.record.name, error, extra=extra)

    async def _one(self, held: StoredVolume) -> None:
        fill = held.record.fill
        if fill is None:
            return
        operation = self._fleet.operations.of_id(fill.operation)
        if operation is not None:
            status = self._fleet.operations.status_of(operation.record).status
            await self._replace(held, volume_fills.after(held.record, status))
            return
        try:
            await self.begin(held)
        except VirtbusError as error:
            if error.reason not in GONE:
                raise
            why = "its operation was removed before a controller saw its end"
            await self._replace(held, volume_fills.failed(held.record, fill, why))

    async def _replace(self, held: StoredVolume, record: VolumeRecord) -> None:
        """Write the state of a fill; raises ConflictError, BusError."""
        if record == held.record or record.fill is None:
            return
        new = await self._volumes.replace(held, record)
        self._fleet.volumes.apply(new)
        message = f"{record.fill.state}: {record.fill.message}".rstrip(": ")
        self._events.named(EventKind.VOLUME_UPDATED, record, new.revision, message)
        extra = {"code": "volume_fill", "uid": record.uid}
        log.info("volume %s: %s", record.name, message, extra=extra)
