"""Handles `virtbus.api.v1.backup-schedule.*`, the requests about schedules of backups."""

import logging

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.owners import check_owner, may_touch
from virtbus.bus.client.ports import Bus, Entry, EntryKind, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import backup_schedules, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import with_request
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredBackupSchedule
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import stored_in
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
from virtbus.schemas.records import read_backup_schedule
from virtbus.schemas.subjects import backup_schedule_record
from virtbus.schemas.wire import encode, validate

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
        self._fleet = fleet
        self._events = events
        self._storage = storage
        self._quota = quota
        self._vms = vms

    async def create(self, request: Request) -> BackupScheduleView:
        """Make a schedule; a repeat with its uid changes nothing."""
        want = validate(BackupScheduleCreate, request.data)
        vm = await self._vms.find(
            VmRef(name=want.spec.vm, namespace=want.namespace), request.account
        )
        uid = want.uid or self._bus.sources.uuid7()
        record = backup_schedules.made(want, uid, vm.record.owner, self._bus.sources.time_ns())
        key = backup_schedule_record(want.namespace, want.name)
        for _ in range(ATTEMPTS):
            entry, held = await self._look(key)
            if held is not None:
                backup_schedules.refuse_taken(held.record, record)
                return backup_schedules.shown(held)
            self._refuse_more(want.namespace)
            refuse_late(request.deadline_s)
            try:
                expect = entry.revision if entry is not None else 0
                revision = await self._bus.put(key, encode(record), expect=expect)
            except ConflictError:
                continue
            held = StoredBackupSchedule(record, revision)
            self._report(EventKind.BACKUP_SCHEDULE_CREATED, held, f"backs up {want.spec.vm}")
            return backup_schedules.shown(held)
        raise contended(f"the backup schedule {want.name}")

    async def get(self, request: Request) -> BackupScheduleView:
        want = validate(BackupScheduleAsk, request.data)
        return backup_schedules.shown(await self._find(want, request.account))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(BackupScheduleList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        found = (
            ("/".join(held.order()), backup_schedules.shown(held))
            for held in self._fleet.schedules.listed(want.namespace)
            if held.order() > after and may_touch(request.account, held.record.owner)
        )
        return pages.answer(BackupSchedulePage, found, request, most=want.limit)

    async def update(self, request: Request) -> BackupScheduleView:
        """Change the given fields; a repeat of a request changes nothing."""
        want = validate(BackupScheduleUpdate, request.data)
        for _ in range(ATTEMPTS):
            held = await self._find(want, request.account)
            if request.id in held.record.requests:
                return backup_schedules.shown(held)
            record = backup_schedules.changed(held.record, want)
            if record == held.record:
                return backup_schedules.shown(held)
            refuse_late(request.deadline_s)
            record = with_request(record, held.record, request.id)
            key = backup_schedule_record(want.namespace, want.name)
            try:
                revision = await self._bus.put(key, encode(record), expect=held.revision)
            except ConflictError:
                continue
            held = StoredBackupSchedule(record, revision)
            self._report(EventKind.BACKUP_SCHEDULE_UPDATED, held, "")
            return backup_schedules.shown(held)
        raise contended(f"the backup schedule {want.name}")

    async def delete(self, request: Request) -> BackupScheduleView:
        """End a schedule, also one that cannot be read. Its backups stay."""
        want = validate(BackupScheduleDelete, request.data)
        key = backup_schedule_record(want.namespace, want.name)
        for _ in range(ATTEMPTS):
            entry, held = await self._look(key)
            if entry is None or entry.kind is EntryKind.PURGE:
                raise backup_schedules.not_found(want)
            if held is None:
                check_owner(request.account, "")
                held = StoredBackupSchedule(self._unknown(want), entry.revision)
            check_owner(request.account, held.record.owner)
            refuse_late(request.deadline_s)
            why = held.record.uid.encode()
            try:
                revision = await self._bus.purge(
                    key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S, why=why
                )
            except ConflictError:
                continue
            self._fleet.schedules.purge(key, revision)
            held = held._replace(revision=revision)
            self._tell(EventKind.BACKUP_SCHEDULE_DELETED, held, "")
            return backup_schedules.shown(held)
        raise contended(f"the backup schedule {want.name}")

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: BackupScheduleAsk, account: str) -> StoredBackupSchedule:
        """Return the schedule from the leader; raises VirtbusError 403, 404."""
        entry = await self._bus.get(backup_schedule_record(want.namespace, want.name))
        held = stored_in(entry, read_backup_schedule)
        if held is None:
            raise backup_schedules.not_found(want)
        check_owner(account, held.record.owner)
        return held

    async def _look(self, key: str) -> tuple[Entry | None, StoredBackupSchedule | None]:
        """Return the last message of a key, and its schedule if it can be read."""
        entry = await self._bus.get(key)
        try:
            return entry, stored_in(entry, read_backup_schedule)
        except UnreadableValueError as error:
            log.warning("%s", error, extra={"code": "bad_record"})
            return entry, None

    def _unknown(self, want: BackupScheduleDelete) -> BackupScheduleRecord:
        """Return a record in place of one that cannot be read."""
        spec = {"vm": want.name, "every_s": 86_400, "keep": 1, "suspended": True}
        fields = {"uid": self._bus.sources.uuid7(), "namespace": want.namespace}
        fields |= {"name": want.name}
        return BackupScheduleRecord.model_validate(
            {**fields, "spec": spec, "next_ns": 0, "created_ns": 0}
        )

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new schedule exceeds a quota, or needs the space that VMs need."""
        self._storage.refuse_create("backup schedules", OBJECTS_UNTIL_FULL)
        if why := self._quota.full(self._fleet.schedules, namespace, "backup schedules"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "backup_schedule_quota", message, after_ms=10_000)

    def _report(self, kind: EventKind, held: StoredBackupSchedule, message: str) -> None:
        self._fleet.schedules.apply(held)
        self._tell(kind, held, message)

    def _tell(self, kind: EventKind, held: StoredBackupSchedule, message: str) -> None:
        self._events.named(kind, held.record, held.revision, message)
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)
