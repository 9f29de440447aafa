"""The end of deletes, and the sweep of what a crash left; safe in any number of controllers."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator

from virtbus.bus.ports import Bus, BusError, ConflictError, Entry, EntryKind, WatchMark
from virtbus.controller.core.fleet import Fleet, Held
from virtbus.controller.core.suspects import Suspects
from virtbus.controller.core.vm_keys import Claimed
from virtbus.controller.edge.commit import MARKER_TTL_S, Commits
from virtbus.controller.edge.facts import Facts
from virtbus.controller.edge.lease import Tenure
from virtbus.controller.edge.moves import Moves
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.ids import UNPLACED, is_id, is_uid
from virtbus.schemas.vm import VmRecord, VmStatus

log = logging.getLogger(__name__)

RETRY_S = 1.0
AT_ONCE = 16
"""Deletes ended at once: each is three writes and reads one after the other on the bus."""


class Endings:
    """Finishes deletes whose node has let go, and sweeps orphan claims, secrets and statuses."""

    def __init__(self, bus: Bus, fleet: Fleet, facts: Facts) -> None:
        self._bus = bus
        self._fleet = fleet
        self._facts = facts
        self._commits = Commits(bus, fleet)
        self._moves = Moves(bus, fleet)
        self._claims, self._secrets, self._statuses = Suspects(), Suspects(), Suspects()

    async def finish_released(self, changed: "asyncio.Queue[str]") -> None:
        """Purge each deleted VM once its status says that nothing is left on the host."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._finish_each(changed))

    async def _finish_each(self, changed: "asyncio.Queue[str]") -> None:
        """One after the other; another may have the same VM in hand: one of the two writes."""
        while True:
            uid = await changed.get()
            try:
                await self._finish(uid)
            except VirtbusError as error:
                log.warning("the end of a delete waits: %s", error, extra=_bad(uid))
            except BusError as error:
                log.warning(
                    "the end of a delete is tried again: %s",
                    error,
                    extra={"code": "finish_retry", "uid": uid},
                )
                asyncio.get_running_loop().call_later(RETRY_S, changed.put_nowait, uid)

    async def _finish(self, uid: str) -> None:
        held = self._fleet.vms.get(uid)
        status = self._fleet.status_of(held.record) if held is not None else None
        if held is None or not held.record.deleting:
            return
        if held.record.node != UNPLACED and not _released(held.record, status):
            return
        try:
            await self._commits.finish(held)
        except ConflictError:
            return  # another controller was first, or the record moved: its echo brings us back
        self._facts.emit(Kind.VM_DELETED, held.record, "")
        log.info("deleted %s", held.record.name, extra={"code": "vm_deleted", "uid": uid})

    async def sweep(self, grace_s: float) -> int:
        """One sweep; how many orphans it removed: those that were found for `grace_s`."""
        removed = 0
        claims = {key: c.revision for key, c in self._fleet.claims.items() if self._orphan(key, c)}
        for key in self._claims.due(claims, asyncio.get_running_loop().time(), grace_s):
            removed += await self._passing(self._commits.free_name(key), key)
        await self._reclaim()
        return removed + await self._sweep_secrets(grace_s) + await self._sweep_statuses(grace_s)

    async def _passing(self, removing: Awaitable[bool], key: str) -> bool:
        """What became of one orphan; one that moved, or cannot be read, is passed over."""
        try:
            return await removing
        except ConflictError:
            return False
        except VirtbusError as error:
            log.warning("not swept: %s", error, extra=_bad(key))
            return False

    async def _reclaim(self) -> None:
        """Write claims that nobody can read anew for the VMs that bear their names."""
        bad = {one.key: one.revision for one in self._fleet.damaged.claims()}
        if not bad:
            return
        bearers = {subjects.name_claim(*name): uid for name, uid in self._fleet.names.items()}
        for key in bad.keys() & bearers.keys():
            with contextlib.suppress(ConflictError):
                await self._commits.reclaim(key, bad[key], bearers[key])

    def _orphan(self, key: str, claim: Claimed) -> bool:
        held = self._fleet.vms.get(claim.uid)
        return held is None or _named(held.record) != key

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
        """Purge a secret that is no VM's; where a move lost the other copy, it is brought there."""
        latest = await self._commits.latest(_uid(entry))
        if _belongs(entry, latest):
            return False
        if latest is not None:
            await self._moves.rescue(entry, latest.record)
        else:
            await self._commits.buried(_uid(entry))  # a create that was paused puts them anew
        await self._bus.purge(entry.key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def _sweep_statuses(self, grace_s: float) -> int:
        """Statuses of deleted VMs that their agents have purged: one may be stored behind that.

        A put that hung in a broken connection, or a purge that it garbled. Nodes that are away
        tell by them what they still hold; a bus that lost its records has no marker of a delete.
        """
        fleet, now_s = self._fleet, asyncio.get_running_loop().time()
        found = {
            subjects.vm_status(node, uid): revision
            for node, uid, revision in self._told_statuses()
            if uid not in fleet.vms
            and not fleet.silent(node, now_s)
            and fleet.wish_of(node).fenced is None
        }
        due = self._statuses.due(found, now_s, grace_s)
        return sum([await self._passing(self._sweep_status(key), key) for key in due])

    def _told_statuses(self) -> Iterator[tuple[str, str, int]]:
        """Node, uid and revision of each status, of those that nobody can read, too."""
        for (node, uid), (_, revision) in self._fleet.statuses.items():
            yield node, uid, revision
        for one in self._fleet.damaged.statuses():
            if is_id(node := one.key.split(".")[2]) and is_uid(one.uid):
                yield node, one.uid, one.revision

    async def _sweep_status(self, key: str) -> bool:
        entry = await self._bus.get(key)
        if entry is None or entry.kind is not EntryKind.PUT:
            return False
        if not await self._commits.purged(_uid(entry)):
            return False
        await self._bus.purge(key, expect=entry.revision, marker_ttl_s=MARKER_TTL_S)
        return True

    async def sweep_forever(self, tenure: Tenure, interval_s: float, grace_s: float) -> None:
        """Sweep each `interval_s`, while the lease is held."""
        while True:
            await asyncio.sleep(interval_s)
            tenure.check()
            try:
                removed = await self.sweep(grace_s)
            except BusError as error:
                log.warning("the sweep is tried again: %s", error, extra={"code": "sweep_retry"})
                continue
            if removed:
                log.info("swept %d orphan(s)", removed, extra={"code": "swept"})


def _released(record: VmRecord, status: tuple[VmStatus, int] | None) -> bool:
    """True when the record's node says that nothing is left there."""
    return status is not None and status[0].released and status[0].epoch >= record.epoch


def _bad(about: str) -> dict[str, str]:
    return {"code": "unreadable", "uid": about.rpartition(".")[2]}


def _named(record: VmRecord) -> str:
    return subjects.name_claim(record.namespace, record.name)


def _uid(entry: Entry) -> str:
    return entry.key.rsplit(".", maxsplit=1)[-1]


def _belongs(entry: Entry, held: Held | None) -> bool:
    """True for the secrets of a VM on the VM's own node."""
    return held is not None and entry.key == subjects.vm_secret(held.record.node, held.record.uid)
