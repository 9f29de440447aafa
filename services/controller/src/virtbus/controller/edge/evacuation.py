"""Continues each drain, fence and `vm.move` until the VMs have left their nodes (ADR 0014).

The bus keeps all progress: in node specs, VM records and statuses. Therefore any controller that
gets the fleet lease can continue.
"""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.evacuation import (
    EvacuationTargets,
    evacuating,
    eviction_blocked_reason,
    local_volumes,
    released_by_node,
    runs_after,
)
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.assignment import Assignment
from virtbus.controller.edge.commit import Commits, Fenced
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import Fence, NodeSpec, NodeState
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

ROUND_S = 0.5
SETTLE_S = 6.0
"""A fenced node counts as off after this time without a heartbeat; heartbeats are 4 s apart. The
wait detects a node that came back just before the fence."""

Check = Callable[[], int]
"""Called right before each write; returns the fencing token, or raises LeaseLostError."""


class Evacuations:
    """Runs rounds that move and evacuate VMs, while the fleet lease is held."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        watches: WatchServer,
        events: FleetEvents,
        living: LivingVolumes,
    ) -> None:
        self._fleet = fleet
        self._watches = watches
        self._events = events
        self._commits = Commits(bus, fleet)
        self._living = living
        self._moves = Assignment(bus, fleet, living)
        self._fences: dict[str, tuple[Fence, float]] = {}
        """By node: the active fence, and the loop's time at which this process first saw it."""
        self._kept: dict[str, str] = {}
        """By uid of a VM that its node has not released yet: the reserved target, "" for none."""

    async def run(self, tenure: LeaderTerm) -> None:
        while True:
            try:
                await self.round(tenure.check)
            except (BusError, VirtbusError) as error:
                log.info("evacuation paused: %s", error, extra={"code": "departures_wait"})
            await asyncio.sleep(ROUND_S)

    async def round(self, check: Check) -> None:
        """Move the VMs that their nodes have released, and start to evacuate others."""
        fleet = self._fleet
        node_specs = {
            node: node_spec for node, (node_spec, _) in fleet.node_specs.items() if node_spec.closed
        }
        self._fences = {node: kept for node, kept in self._fences.items() if node in node_specs}
        self._kept = {uid: node for uid, node in self._kept.items() if uid in fleet.evacuating}
        if not fleet.evacuating and not node_specs:
            return
        places = EvacuationTargets(fleet.candidates(asyncio.get_running_loop().time()))
        for uid in sorted(fleet.evacuating):
            held = fleet.vms.get(uid)
            if held is not None and not fleet.damaged.record_of(uid):
                await self._continue(held, places, check)
        for node, node_spec in sorted(node_specs.items()):
            if node_spec.fenced is not None:
                await self._fenced(node, node_spec, node_spec.fenced, places, check)
            elif node_spec.draining is not None:
                await self._drained(
                    node, places, check, discard=node_spec.draining.discard_local_disks
                )

    def _on(self, node: str) -> list[StoredVm]:
        """Return the VMs of a node, the oldest first; omit VMs with an unreadable record."""
        fleet = self._fleet
        there = [held for held in fleet.vms.values() if held.record.node == node]
        there = [held for held in there if not fleet.damaged.record_of(held.record.uid)]
        return sorted(there, key=lambda held: held.record.created_ns)

    async def _continue(self, held: StoredVm, places: EvacuationTargets, check: Check) -> None:
        """Move a leaving VM if its node has released it; reserve its target if not."""
        record, uid = held.record, held.record.uid
        if not released_by_node(record, self._fleet.last_status(record)):
            node = self._kept.get(uid, "")
            if places.open(node):
                places.keep(node, record)
            else:
                self._kept[uid], _ = places.find(record)
            return
        if local_volumes(record):
            await self._home(held, check)
            return
        node, _ = places.find(record, home=True)
        if not node and record.evacuation_target is None:
            # the VM becomes pending: the pending scheduler places it when a node has room
            node = UNPLACED
        if node:
            await self._move(held, record, node, check, self._fence_of(record.node))

    async def _home(self, held: StoredVm, check: Check) -> None:
        """End the evacuation of a VM and leave it on its node, if its volumes are there (ADR 0087).

        While a volume of the VM is moving, this method does nothing: `OffMoves` moves the VM
        together with its volumes.
        """
        record, uid = held.record, held.record.uid
        refs = local_volumes(record)
        found = [self._fleet.volumes.get(ref.namespace, ref.name) for ref in refs]
        if any(one is not None and one.record.is_moving for one in found):
            return
        try:
            for ref in refs:
                await self._living.refuse(ref, uid, record.node)
        except VirtbusError as error:
            log.info("%s waits: %s", record.name, error, extra={"code": "home_waits", "uid": uid})
            return
        await self._move(held, record, record.node, check, self._fence_of(record.node))

    async def _drained(
        self, node: str, places: EvacuationTargets, check: Check, *, discard: bool
    ) -> None:
        """Start to evacuate the VMs of a drained node for which a target node has room."""
        if self._fleet.silent(node, asyncio.get_running_loop().time()):
            return  # a silent node cannot release VMs; an operator must fence it if it is off
        for held in self._on(node):
            record = held.record
            if record.ending or eviction_blocked_reason(record, discard=discard):
                continue
            goal, _ = places.find(record)
            if not goal:
                continue
            self._kept[record.uid] = goal
            wanted = evacuating(record, self._fleet.last_status(record), None)
            wanted = wanted.model_copy(update={"lease": check()})
            try:
                left = await self._commits.replace(held, wanted)
            except ConflictError:
                continue  # the record has changed; the next round sees the change
            self._apply(left)
            self._events.emit(EventKind.VM_EVACUATING, left.record, f"{node} is drained")

    async def _fenced(
        self, node: str, node_spec: NodeSpec, fence: Fence, places: EvacuationTargets, check: Check
    ) -> None:
        """Move the VMs of a fenced node, and complete deletes there, if the node is off."""
        if not self._is_off(node, fence):
            return
        discard = fence.discard_local_disks or (
            node_spec.draining is not None and node_spec.draining.discard_local_disks
        )
        for held in self._on(node):
            record, standing = held.record, self._fence_of(node)
            if standing is None or standing[0].fenced != fence:
                return  # the fence was lifted meanwhile
            if record.deleting:
                check()
                await self._finish(held, standing)
            elif (record.evacuating and not local_volumes(record)) or not eviction_blocked_reason(
                record, discard=discard
            ):
                there, _ = places.find(record)
                if there:
                    runs = runs_after(record, self._fleet.last_status(record))
                    record = record.model_copy(update={"powered": runs})
                    await self._move(held, record, there, check, standing)

    def _is_off(self, node: str, fence: Fence) -> bool:
        """Return True if the node sent no heartbeat in the SETTLE_S since the fence was seen.

        If the node sends heartbeats again, its VMs are not moved: their guests may run, although
        the node is fenced.
        """
        now_s = asyncio.get_running_loop().time()
        kept, since_s = self._fences.get(node, (None, now_s))
        if kept != fence:
            since_s = now_s
            self._fences[node] = (fence, since_s)
        seen = self._fleet.nodes.get(node)
        reported = seen.record.state if seen is not None else NodeState.LEFT
        heard = seen is not None and seen.heard_s > since_s and reported is not NodeState.LEFT
        return not heard and now_s - since_s >= SETTLE_S and self._fleet.may_be_off(node, now_s)

    async def _finish(self, held: StoredVm, fence: Fenced) -> None:
        """Complete the delete of a VM; the fenced node removes the VM's disks when it is back."""
        try:
            revision = await self._commits.finish(held, fence=fence)
        except ConflictError:
            return
        self._fleet.node_spec(fence[0], revision - 1)
        self._events.emit(EventKind.VM_DELETED, held.record, "its node is fenced")

    async def _move(
        self, held: StoredVm, record: VmRecord, node: str, check: Check, fence: Fenced | None
    ) -> None:
        old = held.record.node
        record = record.model_copy(update={"lease": check()})
        try:
            new = await self._moves.move(StoredVm(record, held.revision), node, fence=fence)
        except (ConflictError, NodeFullError, VirtbusError) as error:
            extra = {"code": "move_lost", "uid": record.uid}
            log.info("%s will be retried: %s", record.name, error, extra=extra)
            return
        if fence is not None and node != old:
            self._fleet.node_spec(fence[0], new.revision - 2)
        self._apply(new)
        self._events.emit(EventKind.VM_MOVED, new.record, f"from {old}")
        extra = {"code": "vm_moved", "uid": record.uid}
        log.info("moved %s from %s to %s", record.name, old, node, extra=extra)

    def _fence_of(self, node: str) -> Fenced | None:
        known = self._fleet.node_specs.get(node)
        return known if known is not None and known[0].fenced is not None else None

    def _apply(self, held: StoredVm) -> None:
        if self._fleet.apply(held):
            self._watches.changed(held.record.uid)
