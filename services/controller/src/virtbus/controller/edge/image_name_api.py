"""Handles `virtbus.api.v1.imagename.*`, the requests about image names."""

import logging

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, Entry, EntryKind, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import image_name_changes, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import with_request
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredImageName
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.image_name_api import (
    ImageNameAsk,
    ImageNameDelete,
    ImageNameDeleted,
    ImageNameList,
    ImageNamePage,
    ImageNameSet,
    ImageNameView,
)
from virtbus.schemas.records import read_image_name
from virtbus.schemas.subjects import image_name
from virtbus.schemas.wire import encode, validate

log = logging.getLogger(__name__)


class ImageNameApi:
    """The handlers of `imagename.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        storage: BusStorageGuard,
        quota: Quota,
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._storage = storage
        self._quota = quota

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> ImageNameView:
        want = validate(ImageNameAsk, request.data)
        entry = await self._bus.get(image_name(want.namespace, want.name))
        held = stored_in(entry, read_image_name)
        if held is None:
            raise image_name_changes.not_found(want)
        return image_name_changes.shown(held)

    async def list(self, request: Request) -> pages.Plain:
        want = validate(ImageNameList, request.data)
        # split once: a name may contain "/", a namespace cannot
        after = tuple(pages.key_of(want.continue_).split("/", 1))
        found = (
            ("/".join(held.order()), image_name_changes.shown(held))
            for held in self._fleet.images.names.listed(want.namespace)
            if held.order() > after
        )
        return pages.answer(ImageNamePage, found, request, most=want.limit)

    # --- change ---------------------------------------------------------------------------
    async def set(self, request: Request) -> ImageNameView:
        """Make a name or replace its spec, also if the stored value is unreadable.

        A repeated request changes nothing.
        """
        want = validate(ImageNameSet, request.data)
        image_name_changes.refuse_fleet(want, request.account)
        key = image_name(want.namespace, want.name)
        for _ in range(ATTEMPTS):
            entry, held = await self._look(key)
            if held is not None and request.id in held.record.requests:
                return image_name_changes.shown(held)
            record = image_name_changes.changed(held, want, self._new(want))
            if held is not None and record == held.record:
                return image_name_changes.shown(held)
            if held is None:
                self._refuse_more(want.namespace)
            refuse_late(request.deadline_s)
            record = with_request(record, None, request.id)
            try:
                revision = await self._bus.put(
                    key, encode(record), expect=entry.revision if entry is not None else 0
                )
            except ConflictError:
                continue
            held = StoredImageName(record, revision)
            self._fleet.images.names.apply(held)
            self._report(EventKind.IMAGE_NAME_SET, held, want.spec.url)
            return image_name_changes.shown(held)
        raise contended(f"the image name {want.name}")

    async def delete(self, request: Request) -> ImageNameDeleted:
        """Remove a name, also if its value is unreadable. VMs and images stay."""
        want = validate(ImageNameDelete, request.data)
        image_name_changes.refuse_fleet(want, request.account)
        key = image_name(want.namespace, want.name)
        for _ in range(ATTEMPTS):
            entry, held = await self._look(key)
            if entry is None or entry.kind is EntryKind.PURGE:
                raise image_name_changes.not_found(want)
            uid = held.record.uid if held is not None else ""
            refuse_late(request.deadline_s)
            try:
                revision = await self._bus.purge(
                    key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S, why=uid.encode()
                )
            except ConflictError:
                continue
            self._fleet.images.names.purge(key, revision)
            if held is not None:
                held = held._replace(revision=revision)
                self._report(EventKind.IMAGE_NAME_DELETED, held, "")
            return ImageNameDeleted(namespace=want.namespace, name=want.name, uid=uid)
        raise contended(f"the image name {want.name}")

    # --- shared ---------------------------------------------------------------------------
    async def _look(self, key: str) -> tuple[Entry | None, StoredImageName | None]:
        """Return the last entry of a key, and its image name; None if missing or unreadable."""
        entry = await self._bus.get(key)
        try:
            return entry, stored_in(entry, read_image_name)
        except UnreadableValueError as error:
            log.warning("%s", error, extra={"code": "bad_record"})
            return entry, None

    def _new(self, want: ImageNameSet) -> ImageNameRecord:
        now_ns = self._bus.sources.time_ns()
        return ImageNameRecord(
            uid=self._bus.sources.uuid7(),
            namespace=want.namespace,
            name=want.name,
            spec=want.spec,
            created_ns=now_ns,
            changed_ns=now_ns,
        )

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new name would exceed a quota, or the bus space kept free for VMs."""
        self._storage.refuse_create("image names", OBJECTS_UNTIL_FULL)
        names = self._fleet.images.names
        if why := self._quota.full(names, namespace, "image names", "the bus"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "image_name_quota", message, after_ms=10_000)

    def _report(self, kind: EventKind, held: StoredImageName, message: str) -> None:
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)
