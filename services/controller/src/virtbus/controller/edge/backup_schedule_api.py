"""Handles `virtbus.api.v1.backup-schedule.*`, the requests about backup schedules."""

import logging

from virtbus.bus.client.endpoints import in_time, refuse_late
from virtbus.bus.client.owners import check_owner, may_touch
from virtbus.bus.client.ports import Bus, Handler, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import backup_schedules, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredBackupSchedule
from virtbus.controller.edge.backup_schedule_writes import BackupScheduleWrites
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.vm_api import VmApi
from virtbus.schemas.api import VmRef
from virtbus.schemas.backup_schedule import (
    BackupScheduleAsk,
    BackupScheduleCreate,
    BackupScheduleDelete,
    BackupScheduleList,
    BackupSchedulePage,
    BackupScheduleRecord,
    BackupScheduleUpdate,
    BackupScheduleView,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.subjects import backup_schedule_record
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class BackupScheduleApi:
    """The handlers of `backup-schedule.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        events: FleetEvents,
        storage: BusStorageGuard,
        quota: Quota,
        vms: VmApi,
    ) -> None:
        self._bus = bus
        self._schedules = fleet.operations.schedules
        self._events = events
        self._storage = storage
        self._quota = quota
        self._vms = vms
        self._writes = BackupScheduleWrites(bus)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by verb."""
        return {
            "create": self.create,
            "get": self.get,
            "list": self.list,
            "update": self.update,
            "delete": self.delete,
        }

    async def create(self, request: Request) -> BackupScheduleView:
        """Make a schedule. A repeat with the same uid changes nothing."""
        want = validate(BackupScheduleCreate, request.data)
        vm = await self._vms.find(
            VmRef(name=want.spec.vm, namespace=want.namespace), request.account
        )
        uid = want.uid or self._bus.sources.uuid7()
        record = backup_schedules.made(want, uid, vm.record.owner, self._bus.sources.time_ns())
        if self._schedules.at(backup_schedule_record(want.namespace, want.name)) is None:
            self._refuse_more(want.namespace)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        if created:
            self._tell(EventKind.BACKUP_SCHEDULE_CREATED, held, f"backs up {want.spec.vm}")
        return backup_schedules.shown(held)

    async def get(self, request: Request) -> BackupScheduleView:
        want = validate(BackupScheduleAsk, request.data)
        return backup_schedules.shown(await self._find(want, request.account))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(BackupScheduleList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        found = (
            ("/".join(held.order()), backup_schedules.shown(held))
            for held in self._schedules.listed(want.namespace)
            if held.order() > after and may_touch(request.account, held.record.owner)
        )
        return pages.answer(BackupSchedulePage, found, request, most=want.limit)

    async def update(self, request: Request) -> BackupScheduleView:
        """Change the given fields. A repeated request changes nothing."""
        want = validate(BackupScheduleUpdate, request.data)
        held, changed = await self._writes.change(
            lambda: self._find(want, request.account),
            lambda record: backup_schedules.changed(record, want, self._bus.sources.time_ns()),
            request,
        )
        if changed:
            self._tell(EventKind.BACKUP_SCHEDULE_UPDATED, held, "")
        return backup_schedules.shown(held)

    async def delete(self, request: Request) -> BackupScheduleView:
        """Delete a schedule, even an unreadable one. Its backups stay."""
        want = validate(BackupScheduleDelete, request.data)
        for _ in range(ATTEMPTS):
            try:
                held = await self._find(want, request.account)
            except UnreadableValueError as error:
                check_owner(request.account, "")
                held = StoredBackupSchedule(self._unknown(want), error.found.revision)
            refuse_late(request.deadline_s)
            try:
                revision = await self._writes.end(held)
            except ConflictError:
                continue
            key = backup_schedule_record(want.namespace, want.name)
            self._schedules.purge(key, revision)
            held = held._replace(revision=revision)
            self._emit(EventKind.BACKUP_SCHEDULE_DELETED, held, "")
            return backup_schedules.shown(held)
        raise contended(f"the backup schedule {want.name}")

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: BackupScheduleAsk, account: str) -> StoredBackupSchedule:
        """Return the schedule from the stream's leader; raise VirtbusError 403 or 404."""
        held = await self._writes.latest(want.namespace, want.name)
        if held is None:
            raise backup_schedules.not_found(want)
        check_owner(account, held.record.owner)
        return held

    def _unknown(self, want: BackupScheduleDelete) -> BackupScheduleRecord:
        """Return a record that replaces an unreadable record."""
        spec = {"vm": want.name, "every_s": 86_400, "keep": 1, "suspended": True}
        fields = {"uid": self._bus.sources.uuid7(), "namespace": want.namespace}
        fields |= {"name": want.name}
        return BackupScheduleRecord.model_validate(
            {**fields, "spec": spec, "next_ns": 0, "created_ns": 0}
        )

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new schedule would exceed a quota, or take the space that VMs need."""
        self._storage.refuse_create("backup schedules", OBJECTS_UNTIL_FULL)
        if why := self._quota.full(self._schedules, namespace, "backup schedules"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "backup_schedule_quota", message, after_ms=10_000)

    def _tell(self, kind: EventKind, held: StoredBackupSchedule, message: str) -> None:
        self._schedules.apply(held)
        self._emit(kind, held, message)

    def _emit(self, kind: EventKind, held: StoredBackupSchedule, message: str) -> None:
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)
