"""Deletes VMs with an unreadable record, status or name claim, on a person's request (ADR 0027).

The record's purge marker makes the node's agent end the guest, and remove all that the VM has on
the host.
"""

import logging

from virtbus.bus.client.ports import Bus, EntryKind, Write
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.unreadable import Unreadable, UnreadableValueError, removed
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import holder_of, message_of
from virtbus.controller.edge.reservations import Reservations
from virtbus.schemas import subjects
from virtbus.schemas.api import VmRef
from virtbus.schemas.events import EventKind
from virtbus.schemas.records import DELETED
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmView

log = logging.getLogger(__name__)

NO_UID = "00000000-0000-0000-0000-000000000000"
"""The uid in the answer if the VM had only an unreadable name claim."""


class Removals:
    """Deletes unreadable VMs. A delete may be repeated: a purge expects the unreadable revision."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._commits = Commits(bus, fleet)
        self._reservations = Reservations(bus, fleet)

    async def remove(self, ref: VmRef) -> VmView | None:
        """Remove a VM that has unreadable values, with all its keys; return its last view.

        Return None if all values are readable. Raises ConflictError if values keep changing.
        """
        uid, found = await self._meant(ref)
        held = self._fleet.vms.get(uid)  # read now: the purge removes the VM from the cache
        namespace = held.record.namespace if held else ref.namespace
        name = held.record.name if held else ref.name or ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._remove(uid, found)
                break
            except ConflictError:
                if attempt == ATTEMPTS:
                    raise
        if not found:
            return None
        found.sort(key=lambda one: one.kind != "record")
        return removed(found[0], uid=uid or NO_UID, namespace=namespace, name=name)

    async def _remove(self, uid: str, found: list[Unreadable]) -> None:
        """Remove each unreadable value of a VM, and add it to `found`.

        `found` is kept between attempts: an attempt may purge the record, and then lose a race.
        """
        last = await self._bus.get(subjects.vm_anywhere(uid)) if uid else None
        try:
            if isinstance(message_of(last), VmRecord):
                found.clear()  # the record is readable: an ordinary delete can end the VM
                return
        except UnreadableValueError as error:
            found.append(error.found)
            await self._end(error.found)
        found += [one for one in self._fleet.damaged.statuses() if one.uid == uid]
        for one in found:
            await self._gone(one)

    async def _meant(self, ref: VmRef) -> tuple[str, list[Unreadable]]:
        """Return the uid of the requested VM, "" if unknown, and its name claim if unreadable."""
        if ref.uid is not None:
            return ref.uid, []
        cached = self._fleet.names.get((ref.namespace, ref.name or ""), "")
        try:
            claim = await self._bus.get(subjects.name_claim(ref.namespace, ref.name or ""))
            return holder_of(claim) or cached, []
        except UnreadableValueError as error:
            return cached, [error.found]

    async def _end(self, found: Unreadable) -> None:
        """Purge first the record, then secrets and claims.

        An ordinary delete purges the secrets first. Here the record's purge may conflict, because
        the record was written back: then the VM still needs its secrets. After a crash, the sweep
        of `Finalizer` purges the rest.
        """
        node, uid = found.key.split(".")[2], found.uid
        held = self._fleet.vms.get(uid)
        before = held.record if held is not None and held.record.node == node else None
        if before is not None:  # keep the holds of its volumes: the guest may still run
            before = before.model_copy(update={"volume_refs": {}})
        end = Write(found.key, None, expect=found.revision, ttl_s=MARKER_TTL_S, why=DELETED)
        await self._reservations.write(before, None, [end])
        await self._bus.purge(subjects.vm_secret(node, uid), marker_ttl_s=MARKER_TTL_S)
        for key in [key for key, claim in self._fleet.claims.items() if claim.uid == uid]:
            await self._commits.release_claim(key, uid)
        if before is not None:
            self._events.emit(EventKind.VM_DELETED, before, "its record could not be read")

    async def _gone(self, found: Unreadable) -> None:
        """Purge an unreadable value if it is still the last value of its key."""
        entry = await self._bus.get(found.key)
        if entry is not None and entry.kind is EntryKind.PUT and entry.revision == found.revision:
            await self._bus.purge(found.key, expect=found.revision, marker_ttl_s=MARKER_TTL_S)
        extra = {"code": "unreadable_removed", "uid": found.uid}
        log.warning("removed unreadable %s: %s", found.key, found.why, extra=extra)
