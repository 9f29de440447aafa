"""Handles `virtbus.api.v1.snapshot.*`, the requests about snapshots."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.owners import check_owner, may_touch
from virtbus.bus.client.ports import Bus, Request
from virtbus.controller.core import pages, resting, snapshot_changes, volume_changes
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import refuse_protected
from virtbus.controller.core.nodes import node_not_found
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.snapshot_users import refuse_used
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredSnapshot
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.operation_api import OperationApi
from virtbus.controller.edge.removals import NO_UID
from virtbus.controller.edge.snapshot_orphans import SnapshotOrphans
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.controller.edge.vm_api import VmApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.api import VmRef
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.snapshot import SnapshotRecord, SnapshotState
from virtbus.schemas.snapshot_api import (
    SnapshotAdopt,
    SnapshotAsk,
    SnapshotCreate,
    SnapshotDelete,
    SnapshotList,
    SnapshotPage,
    SnapshotRestore,
    SnapshotUpdate,
    SnapshotView,
)
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_api import VolumeAsk
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class _Source(NamedTuple):
    """The name of a VM or volume; `resource` is "vm" or "volume"."""

    resource: str
    name: str
    namespace: str


class SnapshotApi:
    """The handlers of `snapshot.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        quota: Quota,
        vms: VmApi,
        operations: OperationApi,
    ) -> None:
        self._fleet = fleet
        self._events = events
        self._quota = quota
        self._vms = vms
        self._operations = operations
        self._writes = SnapshotWrites(bus)
        self._volumes = VolumeWrites(bus)
        self._orphans = SnapshotOrphans(bus, fleet.volumes.snapshots)
        self._sources = bus.sources

    # --- create and restore -----------------------------------------------------------------
    async def create(self, request: Request) -> SnapshotView:
        """Write a snapshot, and the operation that makes its data. Its id is the snapshot's uid."""
        want = validate(SnapshotCreate, request.data)
        snapshot_changes.refuse_unclear(want)
        resource, name = ("vm", want.vm) if want.vm else ("volume", want.volume or "")
        source = _Source(resource, name, want.namespace)
        fields = await self._fields(source, request.account, layered=want.layered)
        uid = want.uid or self._sources.uuid7()
        now_ns, more = self._sources.time_ns(), {"protected": want.protected}
        record = snapshot_changes.made(want, uid, fields, now_ns, **more)
        fields["layered"] = want.layered
        return self.show(await self._accept(record, fields, None, request))

    async def restore(self, request: Request) -> SnapshotView:
        """Write an operation that restores in place; return the snapshot of the replaced disks."""
        want = validate(SnapshotRestore, request.data)
        restored = (await self.find(want, request.account)).record
        snapshot_changes.refuse_incomplete(restored)
        name = want.to or restored.source
        source = _Source(restored.resource, name, restored.namespace)
        fields = await self._fields(source, request.account, in_place=True, layered=True)
        if want.to is None:
            snapshot_changes.refuse_another(restored, fields["uid"])
        snapshot_changes.refuse_elsewhere(restored, name, fields["node"])
        uid = want.keep_uid or self._sources.uuid7()
        name = want.keep or snapshot_changes.kept_name(restored, uid)
        named = SnapshotAsk(name=name, namespace=want.namespace)
        now_ns, more = self._sources.time_ns(), {"replaced_by": restored.name}
        record = snapshot_changes.made(named, uid, fields, now_ns, **more)
        return self.show(await self._accept(record, fields, restored, request))

    async def adopt(self, request: Request) -> SnapshotView:
        """Write the record of a snapshot that has data on the requested node, but no record."""
        want = validate(SnapshotAdopt, request.data)
        if not self._fleet.has_node(want.node):
            raise node_not_found(want.node)
        found = await self._orphans.find(want)
        now_ns = self._sources.time_ns()
        record = snapshot_changes.adopted(want, found, now_ns)
        self._refuse_more(want.namespace)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        if created:
            self.tell(EventKind.SNAPSHOT_CREATED, held, f"adopted from {want.node}")
        return self.show(held)

    async def _fields(
        self, source: _Source, account: str, *, layered: bool, in_place: bool = False
    ) -> dict[str, object]:
        """Return the operation's fields; raises VirtbusError if the source cannot be used."""
        if source.resource == "vm":
            vm = await self._vms.find(VmRef(name=source.name, namespace=source.namespace), account)
            state = self._vms.show(vm).state
            need = _need(layered=layered or state in resting.UP_STATES)
            snapshot_changes.refuse_pools(vm.record.volume_refs.values(), need)
            snapshot_changes.refuse_devices(vm.record.spec)
            if in_place:
                await self._refuse_protected(vm.record)
            await self._vms.off_moves.refuse_moving(vm.record)
            return resting.of_vm(vm.record, state, live=not in_place)
        ask = VolumeAsk(name=source.name, namespace=source.namespace)
        volume = await self._volumes.latest(ask.namespace, ask.name)
        if volume is None:
            raise volume_changes.not_found(ask)
        check_owner(account, volume.record.owner)
        now_s = asyncio.get_running_loop().time()
        holder = self._fleet.show(volume.record.holder, now_s)
        used = holder is not None and holder.state in resting.UP_STATES
        snapshot_changes.refuse_pools((ref_of(volume.record),), _need(layered=layered or used))
        if in_place:
            snapshot_changes.refuse_protected(volume.record)
        return resting.of_volume(
            volume.record, resting.running_holder(volume.record, holder, live=not in_place)
        )

    async def _refuse_protected(self, vm: VmRecord) -> None:
        """Raise 409 for a restore in place if the VM, or a volume that it holds, is protected.

        All volumes of the VM count: only the node knows which volumes are in the snapshot.
        """
        refuse_protected(vm)
        for ref in vm.volume_refs.values():
            volume = await self._volumes.latest(ref.namespace, ref.name)
            if volume is not None and volume.record.uid == ref.uid:
                snapshot_changes.refuse_protected(volume.record)

    async def _accept(
        self,
        record: SnapshotRecord,
        fields: dict[str, object],
        restored: SnapshotRecord | None,
        request: Request,
    ) -> StoredSnapshot:
        """Write the snapshot, then its operation.

        If a crash leaves the snapshot without its operation, `SnapshotSweep` completes or removes
        the snapshot.
        """
        if self._fleet.volumes.snapshots.get(record.namespace, record.name) is None:
            self._refuse_more(record.namespace)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        if created:
            self.tell(EventKind.SNAPSHOT_CREATED, held, record.source)
        if not held.record.ready:
            operation = snapshot_changes.operation_of(held.record, fields, restored)
            await self._operations.accept(operation, request.deadline_s)
        return held

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new snapshot would exceed a quota, or the bus space kept free for VMs."""
        if why := self._quota.full(self._fleet.volumes.snapshots, namespace, "snapshots"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "snapshot_quota", message, after_ms=10_000)
        self._operations.refuse_more(namespace)

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> SnapshotView:
        return self.show(await self.find(validate(SnapshotAsk, request.data), request.account))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(SnapshotList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        found = (
            ("/".join(held.order()), self.show(held))
            for held in self._fleet.volumes.snapshots.selected(want)
            if held.order() > after and may_touch(request.account, held.record.owner)
        )
        return pages.answer(SnapshotPage, found, request, most=want.limit)

    # --- change ---------------------------------------------------------------------------
    async def update(self, request: Request) -> SnapshotView:
        want = validate(SnapshotUpdate, request.data)

        def change(record: SnapshotRecord) -> SnapshotRecord:
            return snapshot_changes.protected(record, want.protected)

        return self.show(await self._change(want, change, EventKind.SNAPSHOT_UPDATED, request))

    async def delete(self, request: Request) -> SnapshotView:
        """Mark a snapshot as deleting; `SnapshotSweep` then removes its data and its record.

        Raises:
            VirtbusError: the 409 errors of `refuse_used` and `snapshot_changes.deleting`.
        """
        want, kind = validate(SnapshotDelete, request.data), EventKind.SNAPSHOT_DELETING

        def change(record: SnapshotRecord) -> SnapshotRecord:
            refuse_used(record, self._fleet)
            return snapshot_changes.deleting(record)

        try:
            return self.show(await self._change(want, change, kind, request))
        except UnreadableValueError as error:
            return self.show(await self._mend(want, error, request.account))

    async def _mend(
        self, want: SnapshotDelete, error: UnreadableValueError, account: str
    ) -> StoredSnapshot:
        """Replace an unreadable record by a record that marks the snapshot as deleting."""
        known = self._fleet.volumes.snapshots.get(want.namespace, want.name)
        check_owner(account, known.record.owner if known else "")
        record = snapshot_changes.mended(want, known.record if known else None, NO_UID)
        held = await self._writes.mend(error, record)
        self.tell(EventKind.SNAPSHOT_DELETING, held, "its record could not be read")
        return held

    async def _change(
        self,
        want: SnapshotAsk,
        change: Callable[[SnapshotRecord], SnapshotRecord],
        kind: EventKind,
        request: Request,
    ) -> StoredSnapshot:
        held, changed = await self._writes.change(
            lambda: self.find(want, request.account), change, request
        )
        if changed:
            self.tell(kind, held, "")
        return held

    # --- shared ---------------------------------------------------------------------------
    async def find(self, want: SnapshotAsk, account: str) -> StoredSnapshot:
        """Return the snapshot, read from the stream's leader.

        Raises:
            VirtbusError:
                404: the snapshot does not exist.
                403: the account may not use the snapshot.
                409: the snapshot's uid differs from the requested uid.
        """
        held = await self._writes.latest(want.namespace, want.name)
        if held is None:
            raise snapshot_changes.not_found(want)
        check_owner(account, held.record.owner)
        snapshot_changes.refuse_other(want, held.record)
        return held

    def tell(self, kind: EventKind, held: StoredSnapshot, message: str) -> None:
        self._fleet.volumes.snapshots.apply(held)
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)

    def show(self, held: StoredSnapshot) -> SnapshotView:
        return snapshot_changes.shown(held, self._waits(held.record))

    def _waits(self, record: SnapshotRecord) -> str:
        """Return why the snapshot's completion or removal waits; "" if it does not wait."""
        waits = snapshot_changes.state_of(record) in {
            SnapshotState.CREATING,
            SnapshotState.DELETING,
        }
        now_s = asyncio.get_running_loop().time()
        if not waits or not self._fleet.silent(record.node, now_s):
            return ""
        return f"{record.node} does not answer; this continues when it does"


def _need(*, layered: bool) -> snapshot_changes.Need:
    return "snapshots" if layered else "copied_snapshots"
