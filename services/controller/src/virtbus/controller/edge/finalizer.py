"""Completes deletes, and removes orphans that crashes left.

Any number of controllers may do both at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core import address_plan
from virtbus.controller.core.claims import addresses_of, claim_value, claims_of
from virtbus.controller.core.evacuation import released_by_node
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.orphan_grace import OrphanGrace
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.volume_attachment import released
from virtbus.controller.edge.assignment import Assignment
from virtbus.controller.edge.cas import MARKER_TTL_S
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import purged
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED, is_id, is_uid
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

RETRY_S = 1.0
MENDED_S = 30.0
"""Delay of a retry after an unreadable value. The repair of that value may not queue the VM."""
AT_ONCE = 16
"""Number of concurrent deletes: each makes three writes and reads in sequence."""


class Finalizer:
    """Completes deletes of released VMs, and sweeps orphan claims, secrets and statuses."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._commits = Commits(bus, fleet)
        self._moves = Assignment(bus, fleet)
        self._claims, self._secrets, self._statuses = OrphanGrace(), OrphanGrace(), OrphanGrace()
        self._retried: set[str] = set()
        """The uids that wait for a delayed retry; each uid waits at most once."""

    async def finish_released(self, changed: "asyncio.Queue[str]") -> None:
        """Purge each deleted VM once its status says that nothing is left on the host.

        `changed` yields the uids of VMs whose record or status has changed.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._finish_each(changed))

    async def _finish_each(self, changed: "asyncio.Queue[str]") -> None:
        """Complete deletes in a loop. If two tasks get the same uid, the CAS lets one succeed."""
        while True:
            uid = await changed.get()
            try:
                await self._finish(uid)
            except (BusError, VirtbusError) as error:
                after_s = RETRY_S if isinstance(error, BusError) else MENDED_S
                extra = {"code": "finish_retry", "uid": uid}
                log.warning("end of a delete, tried again in %g s: %s", after_s, error, extra=extra)
                if uid not in self._retried:
                    self._retried.add(uid)
                    asyncio.get_running_loop().call_later(after_s, self._retry, changed, uid)

    def _retry(self, changed: "asyncio.Queue[str]", uid: str) -> None:
        self._retried.discard(uid)
        changed.put_nowait(uid)

    async def _finish(self, uid: str) -> None:
        held = self._fleet.vms.get(uid)
        if held is not None and held.record.detaching and not held.record.deleting:
            await self._free_volumes(held)
        if held is not None and held.record.address_claims and not held.record.deleting:
            await self._free_addresses(held)
        if held is None or not held.record.deleting:
            return
        status = self._fleet.last_status(held.record)
        if held.record.node != UNPLACED and not released_by_node(held.record, status):
            return
        try:
            await self._commits.finish(held)
        except ConflictError:
            return  # another controller was first, or the record changed and is queued again
        self._events.emit(EventKind.VM_DELETED, held.record, "")
        log.info("deleted %s", held.record.name, extra={"code": "vm_deleted", "uid": uid})

    async def _free_volumes(self, held: StoredVm) -> None:
        """End the VM's holds of those volumes that its node has detached."""
        before = held.record
        record = released(before, self._fleet.last_status(before))
        if record == before:
            return
        try:
            self._fleet.apply(await self._commits.replace(held, record))
        except ConflictError:
            return  # another controller was first, or the record changed and is queued again
        for name in before.detaching.keys() - record.detaching.keys():
            ref = before.volume_refs[name]
            volume = self._fleet.volumes.get(ref.namespace, ref.name)
            if volume is not None:
                message = f"detached from {record.name}"
                kind, revision = EventKind.VOLUME_UPDATED, volume.revision
                self._events.named(kind, volume.record, revision, message)
            extra = {"code": "volume_detached", "uid": ref.uid, "vm": record.uid}
            log.info("detached %s from %s", ref.name, record.name, extra=extra)

    async def _free_addresses(self, held: StoredVm) -> None:
        """Release the addresses of interfaces that the VM's guest no longer has."""
        before = held.record
        record = address_plan.released(before, self._fleet.last_status(before))
        if record == before:
            return
        try:
            self._fleet.apply(await self._commits.replace(held, record))
        except ConflictError:
            return  # another controller was first, or the record changed and is queued again
        kept = addresses_of(record)
        for key in addresses_of(before):
            if key not in kept:
                await self._commits.release_claim(key, record.uid)

    async def sweep(self, grace_s: float) -> int:
        """Remove the orphans that have existed for at least `grace_s`; return their number."""
        removed = 0
        claims = self._orphans()
        for key in self._claims.due(claims, asyncio.get_running_loop().time(), grace_s):
            removed += await self._passing(self._commits.free_claim(key), key)
        await self._reclaim()
        return removed + await self._sweep_secrets(grace_s) + await self._sweep_statuses(grace_s)

    async def _passing(self, removing: Awaitable[bool], key: str) -> bool:
        """Await a removal; return False if the orphan has changed or cannot be read."""
        try:
            return await removing
        except ConflictError:
            return False
        except VirtbusError as error:
            log.warning("sweep skipped: %s", error, extra=_bad(key))
            return False

    async def _reclaim(self) -> None:
        """Replace each unreadable claim whose name or address is in a VM's record."""
        bad = {one.key: one.revision for one in self._fleet.damaged.claims()}
        if not bad:
            return
        bearers = {
            key: uid for uid, held in self._fleet.vms.items() for key in claims_of(held.record)
        }
        for key in bad.keys() & bearers.keys():
            with contextlib.suppress(ConflictError):
                claim = encode(claim_value(key, bearers[key]))
                await self._bus.put(key, claim, expect=bad[key])

    def _orphans(self) -> dict[str, int]:
        """Return the revision of each claim whose name or address is not in its VM's record."""
        own = {uid: set(claims_of(held.record)) for uid, held in self._fleet.vms.items()}
        return {
            key: claim.revision
            for key, claim in self._fleet.claims.items()
            if key not in own.get(claim.uid, ())
        }

    async def _sweep_secrets(self, grace_s: float) -> int:
        found: dict[str, Entry] = {}
        async with self._bus.watch("$KV.sec.>") as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    break
                if isinstance(item, WatchMark) or item.kind is not EntryKind.PUT:
                    continue
                if f".{subjects.SIGNING}." in item.key:
                    continue
                if not _belongs(item, self._fleet.vms.get(_uid(item))):
                    found[item.key] = item
        orphans = {key: entry.revision for key, entry in found.items()}
        due = self._secrets.due(orphans, asyncio.get_running_loop().time(), grace_s)
        return sum([await self._passing(self._sweep_secret(found[key]), key) for key in due])

    async def _sweep_secret(self, entry: Entry) -> bool:
        """Purge a secret that is not at its VM's node.

        If the VM has moved, its new node first gets a copy of the secret, if it has none.
        """
        latest = await self._commits.latest(_uid(entry))
        if _belongs(entry, latest):
            return False
        if latest is not None:
            await self._moves.rescue(entry, latest.record)
        else:
            # the tombstone makes a paused create store its secrets again
            await self._commits.buried(_uid(entry))
        await self._bus.purge(entry.key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def _sweep_statuses(self, grace_s: float) -> int:
        """Remove statuses of deleted VMs that are on the bus although the agent purged them.

        The cause is a put that hung in a broken connection, or a garbled purge. Statuses of
        unreachable nodes are kept, because they show the VMs on these nodes. A status is also kept
        if the VM's record has no purge marker: the bus may have lost the record.
        """
        fleet, now_s = self._fleet, asyncio.get_running_loop().time()
        found = {
            subjects.vm_status(node, uid): revision
            for node, uid, revision in self._all_statuses()
            if uid not in fleet.vms
            and not fleet.silent(node, now_s)
            and fleet.node_spec_of(node).fenced is None
        }
        due = self._statuses.due(found, now_s, grace_s)
        return sum([await self._passing(self._sweep_status(key), key) for key in due])

    def _all_statuses(self) -> Iterator[tuple[str, str, int]]:
        """Yield node, uid and revision of each status, including unreadable ones."""
        for (node, uid), (_, revision) in self._fleet.statuses.items():
            yield node, uid, revision
        for one in self._fleet.damaged.statuses():
            if is_id(node := one.key.split(".")[2]) and is_uid(one.uid):
                yield node, one.uid, one.revision

    async def _sweep_status(self, key: str) -> bool:
        entry = await self._bus.get(key)
        if entry is None or entry.kind is not EntryKind.PUT:
            return False
        if not purged(await self._bus.get(subjects.vm_anywhere(_uid(entry)))):
            return False  # a missing record without a purge marker does not prove a delete
        await self._bus.purge(key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def sweep_forever(self, tenure: LeaderTerm, interval_s: float, grace_s: float) -> None:
        """Sweep each `interval_s`, while the fleet lease is held."""
        while True:
            await asyncio.sleep(interval_s)
            tenure.check()
            try:
                removed = await self.sweep(grace_s)
            except BusError as error:
                log.warning(
                    "sweep failed, will be retried: %s", error, extra={"code": "sweep_retry"}
                )
                continue
            if removed:
                log.info("swept %d orphan(s)", removed, extra={"code": "swept"})


def _bad(about: str) -> dict[str, str]:
    return {"code": "unreadable", "uid": about.rpartition(".")[2]}


def _uid(entry: Entry) -> str:
    return entry.key.rsplit(".", maxsplit=1)[-1]


def _belongs(entry: Entry, held: StoredVm | None) -> bool:
    """Return True if the entry holds the VM's secrets for the VM's current node."""
    return held is not None and entry.key == subjects.vm_secret(held.record.node, held.record.uid)
