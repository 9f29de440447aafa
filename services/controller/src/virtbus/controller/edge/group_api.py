"""Handles `virtbus.api.v1.security-group.*`, the requests about security groups."""

import logging

from virtbus.bus.client.endpoints import in_time, refuse_late
from virtbus.bus.client.owners import may_touch, owner_of
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import group_changes, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.named_creates import refuse_other
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.security_groups import Membership
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredGroup
from virtbus.controller.edge.bus_storage import OBJECTS_UNTIL_FULL, BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.records import read_security_group
from virtbus.schemas.security_group import GroupSpec, LabelSelector, SecurityGroupRecord
from virtbus.schemas.security_group_api import (
    SecurityGroupCreate,
    SecurityGroupCreated,
    SecurityGroupDelete,
    SecurityGroupList,
    SecurityGroupPage,
    SecurityGroupRef,
    SecurityGroupUpdate,
    SecurityGroupView,
)
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


def group_writes(bus: Bus) -> NamedWrites[SecurityGroupRecord]:
    """Return the controller's writes of security groups."""
    return NamedWrites(
        bus,
        "security group",
        subjects.security_group,
        read_security_group,
        group_changes.create_step,
    )


class GroupApi:
    """The handlers of `security-group.*`; each takes a Request and returns the answer's model."""

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
        self._writes = group_writes(bus)

    async def create(self, request: Request) -> SecurityGroupCreated:
        want = validate(SecurityGroupCreate, request.data)
        record = SecurityGroupRecord(
            uid=want.uid or self._bus.sources.uuid7(),
            namespace=want.namespace,
            name=want.name,
            labels=dict(want.labels),
            spec=want.spec,
            owner=owner_of(request.account),
            created_ns=self._bus.sources.time_ns(),
        )
        if self._fleet.groups.get(want.namespace, want.name) is None:
            self._refuse_more(want.namespace)
        async with in_time(request.deadline_s):
            held, created = await self._writes.create(record)
        _check_owner(request, held.record)
        self._fleet.groups.apply(held)
        if created:
            self._tell(EventKind.GROUP_CREATED, held)
        return SecurityGroupCreated(group=self._show(held), created=created)

    def _refuse_more(self, namespace: str) -> None:
        """Raise 429 if a new group would exceed a quota, or the bus space kept free for VMs."""
        self._storage.refuse_create("security groups", OBJECTS_UNTIL_FULL)
        if why := self._quota.full(self._fleet.groups, namespace, "security groups", "the bus"):
            message = f"{why}; delete some, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "security_group_quota", message, after_ms=10_000)

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> SecurityGroupView:
        return self._show(await self._find(validate(SecurityGroupRef, request.data), request))

    async def list(self, request: Request) -> pages.Plain:
        want = validate(SecurityGroupList, request.data)
        after = tuple(pages.key_of(want.continue_).split("/"))
        labels, members = want.labels.items(), self._members()
        found = (
            ("/".join(held.order()), self._shown(held, members))
            for held in self._fleet.groups.listed(want.namespace)
            if held.order() > after and labels <= held.record.labels.items()
            if may_touch(request.account, held.record.owner)
        )
        return pages.answer(SecurityGroupPage, found, request, most=want.limit)

    # --- change ---------------------------------------------------------------------------
    async def update(self, request: Request) -> SecurityGroupView:
        want = validate(SecurityGroupUpdate, request.data)
        held, changed = await self._change(want, request)
        if changed:
            self._fleet.groups.apply(held)
            self._tell(EventKind.GROUP_UPDATED, held)
        return self._show(held)

    async def _change(
        self, want: SecurityGroupUpdate, request: Request
    ) -> tuple[StoredGroup, bool]:
        found: list[StoredGroup] = []

        async def find() -> StoredGroup:
            found[:] = [await self._find(want, request)]
            return found[0]

        return await self._writes.change(
            find, lambda _: group_changes.updated(found[0], want), request
        )

    async def delete(self, request: Request) -> SecurityGroupView:
        """Delete a group, also an unreadable one. The leader task `NodeGroups` purges its keys."""
        want = validate(SecurityGroupDelete, request.data)
        key = subjects.security_group(want.namespace, want.name)
        for _ in range(ATTEMPTS):
            try:
                held = await self._find(want, request)
            except UnreadableValueError as error:
                held = self._unreadable(want, error, request)
            refuse_late(request.deadline_s)
            try:
                revision = await self._writes.end(held)
            except ConflictError:
                continue
            self._fleet.groups.purge(key, revision)
            self._tell(EventKind.GROUP_DELETED, held._replace(revision=revision))
            return self._show(held)
        raise contended(f"the security group {want.name}")

    def _unreadable(
        self, want: SecurityGroupRef, error: UnreadableValueError, request: Request
    ) -> StoredGroup:
        """Return the cached version of an unreadable group, or a group without rules (ADR 0027)."""
        if error.found.reason == "newer_schema":
            raise error  # newer controllers can read the group
        known = self._fleet.groups.get(want.namespace, want.name)
        record = known.record if known is not None else None
        if record is None:
            record = SecurityGroupRecord(
                uid=want.uid or self._bus.sources.uuid7(),
                namespace=want.namespace,
                name=want.name,
                spec=GroupSpec(selector=LabelSelector()),
                created_ns=0,
            )
        _check_owner(request, record)
        return StoredGroup(record, error.found.revision)

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: SecurityGroupRef, request: Request) -> StoredGroup:
        """Return the group, read from the stream's leader.

        Raises:
            VirtbusError:
                404: the group does not exist.
                403: the account may not use the group.
                409: the group's uid differs from the requested uid.
        """
        held = await self._writes.latest(want.namespace, want.name)
        if held is None:
            raise group_changes.not_found(want)
        _check_owner(request, held.record)
        refuse_other(want.uid, held.record, "security group")
        return held

    def _members(self) -> Membership:
        fleet = self._fleet
        return Membership(fleet.vms.values(), fleet.statuses, fleet.groups)

    def _tell(self, kind: EventKind, held: StoredGroup) -> None:
        self._events.named(kind, held.record, held.revision, "")
        extra = {"code": str(kind).replace(".", "_"), "uid": held.record.uid}
        log.info("%s %s/%s", kind, held.record.namespace, held.record.name, extra=extra)

    def _show(self, held: StoredGroup) -> SecurityGroupView:
        return self._shown(held, self._members())

    def _shown(self, held: StoredGroup, members: Membership) -> SecurityGroupView:
        record = held.record
        names = [vm.name for vm in members.of(record)]
        missing = self._fleet.groups.missing(record.spec.peers, record.namespace)
        return group_changes.shown(held, names, missing)


def _check_owner(request: Request, record: SecurityGroupRecord) -> None:
    """Raise 403 if the account may not see and change the group."""
    if not may_touch(request.account, record.owner):
        message = (
            f"the credentials of {owner_of(request.account)} may use only their own security "
            f"groups; {record.name} belongs to {record.owner or 'nobody in particular'}"
        )
        raise VirtbusError(Code.DENIED, "not_owner", message)
