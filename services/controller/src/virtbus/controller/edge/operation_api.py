"""Handles `virtbus.api.v1.operation.*`, the requests about operations."""

import asyncio
import logging

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.owners import check_owner, may_touch
from virtbus.bus.client.ports import Bus, Request
from virtbus.controller.core import exports, pages, resting
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.operations import StoredOperation, shown
from virtbus.controller.core.volume_changes import not_found
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.controller.edge.vm_api import VmApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.api import VmRef
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.operation_api import (
    OperationAsk,
    OperationExport,
    OperationFlatten,
    OperationList,
    OperationPage,
    OperationView,
)
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import VolumeAsk
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class OperationApi:
    """The handlers of `operation.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        room: OperationRoom,
        keep_s: float,
        vms: VmApi,
    ) -> None:
        """`keep_s` is the time after its end for which the bus keeps an operation."""
        self._fleet = fleet
        self._events = events
        self._room = room
        self._keep_s = keep_s
        self._vms = vms
        self._volumes = VolumeWrites(bus)
        self._writes = OperationWrites(bus)
        self._snapshots = SnapshotWrites(bus)
        self._sources = bus.sources

    async def export(self, request: Request) -> OperationView:
        """Write the record of an export, which the disk's node carries out."""
        want = validate(OperationExport, request.data)
        exports.refuse_unclear(want)
        fields = await self._of(want, request.account)
        record = OperationRecord.model_validate(
            {
                "kind": "export",
                "id": want.id or self._sources.uuid7(),
                "namespace": want.namespace,
                "format": want.format,
                "created_ns": self._sources.time_ns(),
                **fields,
            }
        )
        return await self.begin(record, request.deadline_s)

    async def flatten(self, request: Request) -> OperationView:
        """Write the record of a merge of layers, which the disks' node carries out (ADR 0080)."""
        want = validate(OperationFlatten, request.data)
        asked = OperationExport(namespace=want.namespace, vm=want.vm, volume=want.volume)
        exports.refuse_unclear(asked)
        if want.vm is not None:
            vm = await self._vms.find(
                VmRef(name=want.vm, namespace=want.namespace), request.account
            )
            await self._vms.off_moves.refuse_moving(vm.record)
            fields = resting.of_vm(vm.record, self._vms.show(vm).state, live=True)
        else:
            fields = self._resting(await self._volume(asked, request.account))
        made: dict[str, object] = {"kind": "flatten", "id": want.id or self._sources.uuid7()}
        made |= {"namespace": want.namespace, "created_ns": self._sources.time_ns()}
        return await self.begin(
            OperationRecord.model_validate({**fields, **made}), request.deadline_s
        )

    async def begin(self, record: OperationRecord, deadline_s: float) -> OperationView:
        """Write an operation if quota and bus have room; raises as `accept` and `refuse_more`."""
        if self._fleet.operations.of_id(record.id) is None:
            self._room.refuse_more(record.namespace)
        return await self._show(await self.accept(record, deadline_s))

    async def accept(self, record: OperationRecord, deadline_s: float) -> StoredOperation:
        """Write an operation once for each id; raises as `OperationWrites.create`.

        Raises VirtbusError 504 after the deadline.
        """
        refuse_late(deadline_s)
        held, created = await self._writes.create(record)
        self._fleet.operations.apply(held)
        if created:
            self._events.operation(held.record, held.revision)
            extra = {"code": "operation_accepted", "uid": record.uid}
            log.info("%s of %s accepted: %s", record.kind, record.name, record.id, extra=extra)
        return held

    async def _of(self, want: OperationExport, account: str) -> dict[str, object]:
        """Return the operation's fields; raises VirtbusError if the disk does not exist."""
        if want.volume is not None:
            return exports.of_volume(await self._volume(want, account))
        held = await self._vms.find(VmRef(name=want.vm, namespace=want.namespace), account)
        return exports.of_vm(want, held.record, self._vms.show(held).state)

    async def _volume(self, want: OperationExport, account: str) -> VolumeRecord:
        """Raises VirtbusError 404, 403."""
        ask = VolumeAsk(name=want.volume, namespace=want.namespace)
        volume = await self._volumes.latest(ask.namespace, ask.name)
        if volume is None:
            raise not_found(ask)
        check_owner(account, volume.record.owner)
        return volume.record

    def _resting(self, volume: VolumeRecord) -> dict[str, object]:
        """Return the fields of an operation on a volume that no running VM holds.

        Raises the errors of `resting.of_volume` and `resting.running_holder`.
        """
        holder = self._fleet.show(volume.holder, asyncio.get_running_loop().time())
        return resting.of_volume(volume, resting.running_holder(volume, holder))

    def refuse_more(self, namespace: str) -> None:
        self._room.refuse_more(namespace)

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> OperationView:
        want = validate(OperationAsk, request.data)
        return await self._show(await self._find(want, request.account))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(OperationList, request.data)
        operations, keep_s = self._fleet.operations, self._keep_s
        found = (
            (key, operations.show(held, keep_s))
            for key, held in operations.listed(want.namespace, pages.key_of(want.continue_))
            if may_touch(request.account, held.record.owner)
        )
        return pages.answer(OperationPage, found, request, most=want.limit)

    # --- end ------------------------------------------------------------------------------
    async def cancel(self, request: Request) -> OperationView:
        """Request that an operation ends without effect; the answer may still say Running."""
        want = validate(OperationAsk, request.data)
        await self._find(want, request.account)
        held = await self._writes.cancel(want.id)
        if held is None:
            raise _unknown(want.id)
        return await self._show(held)

    async def finish(self, id_: str, account: str) -> OperationView:
        """End an operation of `backup.serve` as succeeded.

        Raises:
            VirtbusError: 404: the operation does not exist. Also the errors of
                `OperationWrites.finish`.
        """
        await self._find(OperationAsk(id=id_), account)
        held = await self._writes.finish(id_)
        if held is None:
            raise _unknown(id_)
        return await self._show(held)

    async def delete(self, request: Request) -> OperationView:
        """Remove an operation that has ended. Its node then removes the operation's file."""
        want = validate(OperationAsk, request.data)
        held = await self._find(want, request.account)
        view = await self._show(held)
        if not (await self._writes.status(held.record)).status.ended:
            message = f"the operation {want.id} has not ended; cancel it first"
            raise VirtbusError(Code.CONFLICT, "operation_open", message)
        await self._refuse_needed(held.record)
        await self._writes.remove(held)
        return view

    async def _refuse_needed(self, record: OperationRecord) -> None:
        """Raise 409 while the operation's snapshot is not ready and needs the result."""
        if record.snapshot is None:
            return
        ref = record.snapshot
        snapshot = await self._snapshots.latest(ref.namespace, ref.name)
        if snapshot is not None and snapshot.record.uid == ref.uid and not snapshot.record.ready:
            message = f"the snapshot {ref.name} is being completed or removed; repeat after that"
            raise VirtbusError(Code.CONFLICT, "operation_open", message, after_ms=5000)

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: OperationAsk, account: str) -> StoredOperation:
        """Read the operation from the stream's leader; raises VirtbusError 404, 403."""
        held = await self._writes.latest(want.id)
        if held is None:
            raise _unknown(want.id)
        check_owner(account, held.record.owner)
        return held

    async def _show(self, held: StoredOperation) -> OperationView:
        status = (await self._writes.status(held.record)).status
        view = shown(held.record, status, self._keep_s)
        now_s = asyncio.get_running_loop().time()
        if status.ended or not self._fleet.silent(held.record.node, now_s):
            return view
        waits = f"{held.record.node} does not answer; it continues when the node does"
        return view.model_copy(update={"message": waits})


def _unknown(id_: str) -> VirtbusError:
    message = f"there is no operation {id_}; they are kept for a day after their end"
    return VirtbusError(Code.NOT_FOUND, "operation_not_found", message)
