"""Handles `virtbus.api.v1.vm.*`, the requests about VMs."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from virtbus.bus.client import tracing
from virtbus.bus.client.endpoints import in_time, refuse_late
from virtbus.bus.client.owners import check_owner, node_of, owner_of
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import mutations, pages
from virtbus.controller.core.allocations import takes_room
from virtbus.controller.core.demand import demand_of_vm
from virtbus.controller.core.directories import check_directories
from virtbus.controller.core.evacuation import (
    EvacuationTargets,
    data_loss_reason,
    data_stays,
    evacuating,
)
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.input_sizes import refuse_large
from virtbus.controller.core.network_access import check_networks, refuse_unknown
from virtbus.controller.core.network_fit import refuse_misfits
from virtbus.controller.core.placement import never_room, no_room, room
from virtbus.controller.core.runtime_nodes import check_update
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.view import matching_uids
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.volume_attachment import refuse_growth
from virtbus.controller.edge.bus_storage import BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.network_targets import COMMIT_MOST_S, NetworkTargets, network_names
from virtbus.controller.edge.off_moves import OffMoves
from virtbus.controller.edge.removals import Removals
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.seed_updates import SeedUpdates
from virtbus.controller.edge.vm_creates import CreateRules, VmCreates
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas.api import (
    VmCreated,
    VmDelete,
    VmList,
    VmMove,
    VmPage,
    VmRef,
    VmUpdate,
    VmWatch,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class VmApi:
    """The handlers of `vm.*`; each takes a Request and returns the answer's model."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        watches: WatchServer,
        events: FleetEvents,
        storage: BusStorageGuard,
        rules: CreateRules,
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._watches = watches
        self._events = events
        self._commits = Commits(bus, fleet, VolumeHolders(bus, living=rules.living))
        self._removals = Removals(bus, fleet, events)
        self._networks = NetworkTargets(bus, fleet, events)
        self._creates = VmCreates(bus, fleet, watches, events, storage, rules)
        self._seeds = SeedUpdates(bus)
        self.off_moves = OffMoves(bus, fleet, events)
        self.addresses = self._creates.addresses

    async def create(self, request: Request) -> VmCreated | pages.Plain:
        committed, warnings = await self._creates.create(request)
        if not (request.wants_json or warnings):
            return {"vm": self._watches.answer(committed.held), "created": committed.created}
        view = self.show(committed.held)
        return VmCreated(vm=view, created=committed.created, warnings=warnings)

    # --- read -----------------------------------------------------------------------------
    async def get(self, request: Request) -> VmView:
        try:
            return self.show(await self.find(validate(VmRef, request.data), request.account))
        except UnreadableValueError as error:
            known = self._fleet.vms.get(error.found.uid)
            if known is None:
                raise
            check_owner(request.account, known.record.owner)
            return self.show(known)  # the last readable record, with a condition

    async def list(self, request: Request) -> pages.Plain:
        want = validate(VmList, request.data)
        now_s = asyncio.get_running_loop().time()
        owner = owner_of(request.account)
        uids = matching_uids(self._fleet.vms, want.namespace, dict(want.labels), owner)
        vms = self._fleet.vms
        if want.continue_ is not None:
            after = _place(pages.key_of(want.continue_))
            uids = [u for u in uids if vms[u].order() > after]
        found = (("/".join(vms[u].order()), self._fleet.show_held(vms[u], now_s)) for u in uids)
        return pages.answer(VmPage, found, request, most=want.limit)

    async def watch(self, request: Request) -> "asyncio.Future[None]":
        return await self._watches.serve(validate(VmWatch, request.data), request)

    # --- change ---------------------------------------------------------------------------
    async def update(self, request: Request) -> VmView:
        want = validate(VmUpdate, request.data)
        held = await self.find(want, request.account)
        if held.revision != want.revision:
            message = f"{held.record.name} changed meanwhile; get it again and repeat the change"
            raise VirtbusError(Code.CONFLICT, "stale_revision", message)
        seeds = None if want.spec is None else await self._seeds.wanted(held.record, want.spec)
        record = mutations.updated(
            held.record,
            spec=None if seeds is None else seeds.spec,
            reseeded=seeds is not None and seeds.secrets is not None,
            labels=None if want.labels is None else dict(want.labels),
            annotations=want.annotations,
        )
        own = self._fleet.nodes.get(node_of(record.owner))
        check_update(held.record, record, own.record.labels if own is not None else {})
        until_s = asyncio.get_running_loop().time() + COMMIT_MOST_S
        record = await self._with_networks(held.record, record)
        record = await self._creates.with_new_images(record, held.record)
        refuse_large(record)
        refuse_growth(held.record, record, self._fleet.last_status(held.record))
        await self.off_moves.refuse_start(held.record, record)
        self._check_room(held.record, record)
        try:
            if seeds is not None:
                record = await self._seeds.store(record, seeds)
            held = await self._with_addresses(held, record, min(request.deadline_s, until_s))
        except ConflictError:
            message = f"{held.record.name} changed meanwhile; get it again and repeat the change"
            raise VirtbusError(Code.CONFLICT, "stale_revision", message) from None
        except NodeFullError as error:
            raise no_room(error.node, error.why) from None
        self._apply(held)
        self._events.emit(EventKind.VM_UPDATED, record, "", revision=held.revision)
        return self.show(held)

    async def _with_networks(self, before: VmRecord, record: VmRecord) -> VmRecord:
        """Return an updated record with its network objects.

        Raises VirtbusError for networks and directories that the VM cannot use.
        """
        spec, targets = record.spec, record.network_targets
        offers = [seen.record for seen in self._fleet.nodes.values()]
        if spec.networks != before.spec.networks:
            targets = await self._networks.of_spec(spec, record.namespace, before)
            unheard, known = self._fleet.unheard_nodes(), network_names(before.spec)
            refuse_unknown(spec, offers, targets, unheard, known=known)
        check_networks(spec, record.namespace, offers, targets)
        refuse_misfits(spec, targets)
        if not node_of(record.owner):
            own = self._fleet.nodes.get(record.node)
            check_directories(spec, record.namespace, offers if own is None else [own.record])
        return record.model_copy(update={"network_targets": targets})

    async def _with_addresses(self, held: StoredVm, record: VmRecord, until_s: float) -> StoredVm:
        """Claim addresses for added interfaces, and commit; release the claims after a refusal."""
        if record.spec.networks == held.record.spec.networks:
            return await self._replace(held, record, until_s)
        async with in_time(until_s):
            record = await self.addresses.claim(record, held.record)
        try:
            return await self._replace(held, record, until_s)
        except (VirtbusError, ConflictError, NodeFullError):
            await self.addresses.give_back(record, held.record)
            raise

    async def _replace(self, held: StoredVm, record: VmRecord, until_s: float) -> StoredVm:
        """Commit an update.

        An update that adds network objects is refused after `until_s`. After its commit, it takes
        back the delete marks of its networks. If such a network was removed meanwhile, the update
        is reverted, and 409 is raised.
        """
        if not record.network_targets.keys() - held.record.network_targets.keys():
            return await self._commits.replace(held, record)
        async with in_time(until_s):
            committed = await self._commits.replace(held, record)
        try:
            await self._networks.keep(record)
        except VirtbusError:
            before = held.record.model_copy(update={"generation": record.generation + 1})
            with suppress(ConflictError):  # a later update of the VM stays
                self._apply(await self._commits.replace(committed, before))
            raise
        return committed

    async def move(self, request: Request) -> VmView:
        want = validate(VmMove, request.data)

        def begin(record: VmRecord) -> VmRecord:
            mutations.refuse_deleting(record)
            if record.evacuating or record.node == want.to:
                return record
            self._check_move(record, want)
            return evacuating(record, self._fleet.last_status(record), want.to)

        return await self.change(want, begin, request)

    def _check_move(self, record: VmRecord, want: VmMove) -> None:
        """Raise 409 if the VM cannot leave its node, 429 if no other node has room for it."""
        now_s = asyncio.get_running_loop().time()
        node = record.node
        if node == UNPLACED:
            message = (
                f"{record.name} has no node yet; it gets one as soon as a node has room for it"
            )
            raise VirtbusError(Code.CONFLICT, "unplaced", message)
        if self._fleet.silent(node, now_s) and self._fleet.node_spec_of(node).fenced is None:
            message = (
                f"{node} does not answer, so nobody can say that the guest has ended; when the "
                f"host is off for sure: `virtbus node fence {node} --confirm REASON`"
            )
            raise VirtbusError(Code.CONFLICT, "node_silent", message)
        if why := data_stays(record):
            message = f"{record.name} stays: {why}"
            raise VirtbusError(Code.CONFLICT, "volumes_stay", message)
        if record.spec.eviction_strategy is None and not want.discard_local_disks:
            why = data_loss_reason(record)
            if why:
                message = f"{record.name} stays: {why}"
                raise VirtbusError(Code.CONFLICT, "local_disks", message)
        there = record.model_copy(update={"evacuation_target": want.to})
        _, why = EvacuationTargets(self._fleet.candidates(now_s)).find(there)
        if why:
            raise VirtbusError(Code.EXHAUSTED, "no_capacity", why, after_ms=5000)

    async def delete(self, request: Request) -> VmView:
        want = validate(VmDelete, request.data)
        try:
            return await self.change(want, lambda r: mutations.deleting(r, want.grace_s), request)
        except VirtbusError as error:
            lost = error.reason == "vm_not_found" and not owner_of(request.account)
            if error.reason != "unreadable" and not lost:
                raise
            uid = want.uid or self._fleet.names.get((want.namespace, want.name or ""), "")
            known = self._fleet.vms.get(uid)  # the last readable record names the owner
            check_owner(request.account, known.record.owner if known else "")
            removed = await self._removals.remove(want)
            if removed is None:
                raise
            return removed

    async def change(
        self, ref: VmRef, change: Callable[[VmRecord], VmRecord], request: Request
    ) -> VmView:
        """Apply a change by CAS, with retries; return the VM.

        A request acts only once, even if it arrives twice, and never after its deadline.
        """
        held = await self.find(ref, request.account)
        for _ in range(ATTEMPTS):
            if request.id in held.record.requests:
                return self.show(held)
            refuse_late(request.deadline_s)
            record = mutations.with_request(change(held.record), held.record, request.id)
            if record == held.record:
                return self.show(held)
            self._check_room(held.record, record)
            await self.off_moves.refuse_start(held.record, record)
            with tracing.span("virtbus change vm", uid=record.uid, parent=request.traceparent):
                traced = {"traceparent": tracing.current_traceparent() or record.traceparent}
                record = record.model_copy(update=traced)
                try:
                    held = await self._commits.replace(held, record)
                except ConflictError:
                    latest = await self._commits.latest(held.record.uid)
                    if latest is None:
                        raise not_found(ref) from None
                    held = latest
                    continue
            self._apply(held)
            if record.deleting:
                self._events.emit(EventKind.VM_DELETING, record, "")
            elif record.evacuating:
                self._events.emit(
                    EventKind.VM_EVACUATING, record, f"to {record.evacuation_target or 'a node'}"
                )
            return self.show(held)
        message = f"{held.record.name} keeps changing; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)

    # --- shared ---------------------------------------------------------------------------
    async def find(self, ref: VmRef, account: str) -> StoredVm:
        """Read the record from the stream's leader: a change must not start from the cache.

        Raises:
            VirtbusError:
                400: the request has neither a name nor a uid.
                422 `unreadable`: the record, or the claim of the name, is unreadable.
                404: the VM does not exist.
                409 `not_its_name`: the uid belongs to a VM of another name.
                403: `account` is a bridge that did not create the VM (`not_owner`).
        """
        if ref.uid is None and ref.name is None:
            raise VirtbusError(Code.INVALID, "invalid", "name or uid is needed")
        cached = self._fleet.names.get((ref.namespace, ref.name or ""))
        uid = ref.uid or cached
        held = await self._commits.latest(uid) if uid is not None else None
        if held is None and ref.uid is None and ref.name is not None:
            # The cache has no VM of that name, or a deleted VM. The claim names the current VM.
            uid = await self._commits.holder(ref.namespace, ref.name)
            held = await self._commits.latest(uid) if uid not in {None, cached} else None
        if held is None:
            raise not_found(ref)
        _check_named(ref, held.record)
        check_owner(account, held.record.owner)
        return held

    def _check_room(self, before: VmRecord, after: VmRecord) -> None:
        """Raise 422 or 429 if a start, more CPUs or more memory exceed the node's capacity."""
        if after.ending or not takes_room(after) or after.node not in self._fleet.nodes:
            return
        if after.reserved:
            return  # `Reservations.write` checks the room of reserved VMs
        own, want = demand_of_vm(before), demand_of_vm(after)
        if takes_room(before) and own == want:
            return
        node = self._fleet.candidate(after.node, asyncio.get_running_loop().time())
        why = room(want, node, powered=False, disk=False)
        if why is not None:
            raise never_room(after.node, why)
        if takes_room(before):
            node = replace(
                node,
                vcpus=node.vcpus - own.vcpus,
                memory_bytes=node.memory_bytes - own.memory_bytes,
            )
        why = room(want, node, disk=False)
        if why is not None:
            raise no_room(after.node, why)

    def _apply(self, held: StoredVm) -> None:
        """Apply a write to the cache at once: the next placements must not wait for the watch."""
        if self._fleet.apply(held):
            self._watches.changed(held.record.uid)

    def show(self, held: StoredVm) -> VmView:
        return self._fleet.show_held(held, asyncio.get_running_loop().time())


def _check_named(ref: VmRef, record: VmRecord) -> None:
    """Raise 409 if a request contains a uid and another VM's name."""
    there = (record.namespace, record.name)
    asked = (
        ref.namespace if "namespace" in ref.model_fields_set else there[0],
        ref.name or there[1],
    )
    if asked != there:
        message = (
            f"uid {record.uid} is {there[0]}/{there[1]}, not {asked[0]}/{asked[1]}; "
            "give the uid or the name"
        )
        raise VirtbusError(Code.CONFLICT, "not_its_name", message)


def not_found(ref: VmRef) -> VirtbusError:
    """Return the error 404 with the requested uid or name."""
    what = f"uid {ref.uid}" if ref.uid else f"named {ref.name} in namespace {ref.namespace}"
    message = f"there is no VM {what}; `virtbus vm list` shows what there is"
    return VirtbusError(Code.NOT_FOUND, "vm_not_found", message)


def _place(key: str) -> tuple[str, ...]:
    """Return namespace, name and uid from the key in a list's `continue`."""
    place = tuple(key.split("/"))
    if len(place) != 3:
        raise pages.bad_continue()
    return place
