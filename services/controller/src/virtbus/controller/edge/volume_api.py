"""Handles `virtbus.api.v1.volume.*`, the requests about volumes."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.owners import check_owner, may_touch, owner_of
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import pages, volume_changes, volume_fills, volume_moves
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import node_not_found
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_attachment import disks_of, disks_pending
from virtbus.controller.core.volume_holds import hold_node, holding, ref_of
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.image_names import ImageNameReads
from virtbus.controller.edge.removals import NO_UID
from virtbus.controller.edge.volume_fills import VolumeFills
from virtbus.controller.edge.volume_orphans import VolumeOrphans
from virtbus.controller.edge.volume_room import VolumeRoom
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.events import EventKind
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.pool import ON_DEVICES
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import (
    VolumeAdopt,
    VolumeAsk,
    VolumeCreate,
    VolumeCreated,
    VolumeDelete,
    VolumeFillAgain,
    VolumeHolder,
    VolumeList,
    VolumePage,
    VolumeUpdate,
    VolumeView,
)
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


def _is_prepared(record: VolumeRecord) -> bool:
    """Return True if an operation must prepare the volume, also a volume without a source."""
    return record.pool_kind in ON_DEVICES


class VolumeApi:
    """The handlers of `volume.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        room: VolumeRoom,
        fills: VolumeFills,
    ) -> None:
        self._fleet = fleet
        self._events = events
        self.room = room
        self._fills = fills
        self._writes = VolumeWrites(bus)
        self._orphans = VolumeOrphans(bus, fleet)
        self._images = ImageNameReads(bus, fleet)
        self._sources = bus.sources

    async def create(self, request: Request) -> VolumeCreated:
        want = validate(VolumeCreate, request.data)
        record = VolumeRecord(
            uid=want.uid or self._sources.uuid7(),
            namespace=want.namespace,
            name=want.name,
            labels=dict(want.labels),
            spec=want.spec,
            node=self.node(want.node),
            target=await self._target(want),
            created_ns=self._sources.time_ns(),
            owner=owner_of(request.account),
        )
        volume_changes.refuse_made_for_none(record)
        new = self._fleet.volumes.get(want.namespace, want.name) is None
        record = await self.planned(record, request.account, new=new)
        if new:
            volume_changes.refuse_known_uid(record, self._fleet.volumes.of_uid(record.uid))
            self.room.refuse_more(record)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        check_owner(request.account, held.record.owner)
        self._fleet.volumes.apply(held)
        if created:
            self.tell(EventKind.VOLUME_CREATED, held, f"{record.namespace}/{record.name}")
        await self._fills.begin_soon(held)
        return VolumeCreated(volume=self.show(held), created=created)

    async def planned(
        self, record: VolumeRecord, account: str, *, new: bool = True
    ) -> VolumeRecord:
        """Return a volume with the kind of its pool, and with the fill from its source.

        Raises:
            VirtbusError: the volume's pool, source or size is not possible.
        """
        pools = self._fleet.pools
        if new:
            record = pools.admitted(record)
        if record.spec.is_copied or _is_prepared(record):
            record = await self._fills.planned(record, account)
        volume_changes.refuse_large(record)
        if new:
            pools.refuse_new(record, record.spec.size)
        return record

    async def adopt(self, request: Request) -> VolumeView:
        """Write the record of a volume that has data on the requested node, but no record."""
        want = validate(VolumeAdopt, request.data)
        node = self.node(want.node)
        ref = await self._orphans.find(want)
        record = volume_changes.adopted(ref, node, self._sources.time_ns())
        users = self._users(record, ref.uid)
        for vm in users if ref.shared else users[:1]:  # VMs whose records name the volume
            record = holding(record, vm, record.created_ns)
        self.room.refuse_more(record)
        async with in_time(request.deadline_s):
            held, _ = await self._writes.create(record)
        self.tell(EventKind.VOLUME_CREATED, held, f"adopted from {node}")
        return self.show(held)

    async def _target(self, want: VolumeCreate) -> ImageTarget | None:
        """Return the target of the volume's image name; None if the bus lacks that name."""
        ref = want.spec.source.image
        return await self._images.of_ref(ref, want.namespace) if ref else None

    def node(self, node: str | None) -> str:
        """Return the requested node, "" for None; raise 404 for an unknown node."""
        if node is not None and not self._fleet.has_node(node):
            raise node_not_found(node)
        return node or ""

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> VolumeView:
        return self.show(await self.find(validate(VolumeAsk, request.data), request.account))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(VolumeList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        found = (
            ("/".join(held.order()), self.show(held))
            for held in self._fleet.volumes.listed(want.namespace, dict(want.labels))
            if held.order() > after and may_touch(request.account, held.record.owner)
        )
        return pages.answer(VolumePage, found, request, most=want.limit)

    # --- change ---------------------------------------------------------------------------
    async def update(self, request: Request) -> VolumeView:
        want = validate(VolumeUpdate, request.data)

        def change(record: VolumeRecord) -> VolumeRecord:
            changed = volume_changes.updated(record, want)
            self.room.refuse_growth(record, changed.spec.size)
            volume_changes.refuse_large(changed)
            return changed

        return self.show(await self._change(want, change, EventKind.VOLUME_UPDATED, request))

    async def fill(self, request: Request) -> VolumeView:
        """Fill a volume again, by a new operation."""
        want = validate(VolumeFillAgain, request.data)
        self._fills.refuse_more(want.namespace)
        operation = self._sources.uuid7()

        def change(record: VolumeRecord) -> VolumeRecord:
            return volume_fills.again(record, operation)

        held = await self._change(want, change, EventKind.VOLUME_UPDATED, request)
        await self._fills.begin_soon(held)
        return self.show(held)

    async def delete(self, request: Request) -> VolumeView:
        """Mark a volume as deleting; purge its record at once if no node has its data.

        If a node has the data, the record is purged after the node has removed the data.
        """
        want = validate(VolumeDelete, request.data)
        change, kind = volume_changes.deleting, EventKind.VOLUME_DELETING
        try:
            held = await self._change(want, change, kind, request)
        except UnreadableValueError as error:
            held = await self._mend(want, error, request)
        if not volume_changes.has_data_on_node(held.record):
            await self._end(held)
        return self.show(held)

    async def _mend(
        self, want: VolumeDelete, error: UnreadableValueError, request: Request
    ) -> StoredVolume:
        """Replace an unreadable record by a record that marks the volume as deleting."""
        known = self._fleet.volumes.get(want.namespace, want.name)
        check_owner(request.account, known.record.owner if known else "")
        last = known.record if known else None
        users = [vm.uid for vm in self._users(want, None)]
        record = volume_changes.mended(want, last, users, NO_UID)
        held = await self._writes.mend(error, record)
        self.tell(EventKind.VOLUME_DELETING, held, "its record could not be read")
        return held

    def last_readable(
        self, want: VolumeAsk, error: UnreadableValueError, account: str
    ) -> StoredVolume:
        """Return the cached last readable record, with the revision of the unreadable record.

        Raises `error` without a cached record, or if a newer virtbus wrote the unreadable record.
        Raises 403 `not_owner` if the account may not use the volume.
        """
        known = self._fleet.volumes.get(want.namespace, want.name)
        if known is None or error.found.reason == "newer_schema":
            raise error
        check_owner(account, known.record.owner)
        return StoredVolume(known.record, error.found.revision)

    def _users(self, volume: VolumeAsk | VolumeRecord, uid: str | None) -> Sequence[VmRecord]:
        """Return the VMs whose records name the volume with this uid (None: with any uid)."""
        return [
            vm.record
            for vm in self._fleet.vms.values()
            for ref in vm.record.volume_refs.values()
            if (ref.namespace, ref.name) == (volume.namespace, volume.name)
            and uid in {None, ref.uid}
        ]

    async def _end(self, held: StoredVolume) -> None:
        try:
            revision = await self._writes.end(held)
        except ConflictError:
            return  # another controller was first
        record = held.record
        self._events.named(EventKind.VOLUME_DELETED, record, revision, "")
        log.info("deleted volume %s", record.name, extra={"code": "volume_deleted"})

    async def _change(
        self,
        want: VolumeAsk,
        change: Callable[[VolumeRecord], VolumeRecord],
        kind: EventKind,
        request: Request,
    ) -> StoredVolume:
        held, changed = await self._writes.change(
            lambda: self.find(want, request.account), change, request
        )
        if changed:
            self.tell(kind, held, "")
        return held

    # --- shared ---------------------------------------------------------------------------
    async def find(self, want: VolumeAsk, account: str) -> StoredVolume:
        """Return the volume, read from the stream's leader.

        Raises:
            VirtbusError:
                404: the volume does not exist.
                403: the account may not use the volume.
                409: the volume's uid differs from the requested uid.
        """
        held = await self._writes.latest(want.namespace, want.name)
        if held is None:
            raise volume_changes.not_found(want)
        check_owner(account, held.record.owner)
        volume_changes.refuse_other(want, held.record)
        return held

    def tell(self, kind: EventKind, held: StoredVolume, message: str) -> None:
        self._fleet.volumes.apply(held)
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)

    def show(self, held: StoredVolume) -> VolumeView:
        record, message, holders = held.record, self._waits(held.record), []
        for uid in record.holders:
            since_ns = record.holds[uid].since_ns if uid in record.holds else record.held_since_ns
            one = VolumeHolder(uid=uid, since_ns=since_ns, node=hold_node(record, uid))
            vm = self._fleet.vms.get(uid)
            if vm is not None:
                disks = disks_of(vm.record, ref_of(record))
                message = message or disks_pending(self._fleet.last_status(vm.record), disks)
                leaving = bool(disks & vm.record.detaching.keys())
                one = one.model_copy(update={"name": vm.record.name, "detaching": leaving})
            holders.append(one)
        return volume_changes.shown(held, holders, message)

    def _waits(self, record: VolumeRecord) -> str:
        """Return the progress of a copy or move, or why a hold or a delete waits; "" for none."""
        if not record.deleting and not record.lost and (copying := self._fills.progress(record)):
            return copying
        if moving := volume_moves.shown(record, self._fills.moving(record)):
            return moving
        for vm in record.holders:
            if vm not in self._fleet.vms:
                return volume_changes.hold_remains(record, vm, self._fleet.damaged.of(vm))
        node, now_s = record.node, asyncio.get_running_loop().time()
        waits = record.deleting and volume_changes.has_data_on_node(record)
        if not waits or not self._fleet.silent(node, now_s):
            return ""
        return f"{node} does not answer; the data is removed when it does"
