"""Places VMs that wait for a node, the oldest first, as a leader task."""

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core.allocations import with_vm
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.volume_placement import Wait, place_waiting, wait_of
from virtbus.controller.edge.assignment import Assignment
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

ROUND_S = 5.0
"""Maximum interval of rounds: free disk space, for example, may appear without a message."""
SETTLE_S = 0.2
"""Delay after `wake`, so that one round handles simultaneous changes."""
DECLINED_S = 60.0
"""Time after a refusal for which the VM is not placed on that node again."""
AT_ONCE = 16
"""Limit of concurrent moves. The bus accepts 50 concurrent atomic batches for a stream (ADR-50)."""


class Choice(NamedTuple):
    """A decision to move a VM's record to another node."""

    held: StoredVm
    node: str
    """The target; UNPLACED if the VM's node refused the VM, and no other node has room for it."""
    why: str
    """The reason in the event `vm.scheduled`; "" for UNPLACED, which causes no event."""


class PendingScheduler:
    """Finds nodes for VMs without a node, and for VMs that their node refused."""

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
        self._moves = Assignment(bus, fleet, living)
        self._wake = asyncio.Event()
        self._declined: dict[str, dict[str, float]] = {}
        """By uid: the nodes that refused the VM, with the loop's time of the last refusal."""

    def wake(self) -> None:
        """Start a round if a VM waits; called when capacity or a VM may be new."""
        if self._fleet.unplaced or self._fleet.refused:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Place VMs while the fleet lease is held."""
        while True:
            if self._fleet.unplaced or self._fleet.refused:
                await self._round(tenure)
            if await wait_for_event(self._wake, ROUND_S):
                await asyncio.sleep(SETTLE_S)
            self._wake.clear()

    async def _round(self, tenure: LeaderTerm) -> None:
        choices = list(self._choices(asyncio.get_running_loop().time()))
        for first in range(0, len(choices), AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for choice in choices[first : first + AT_ONCE]:
                    group.create_task(self._move(choice, tenure))

    def _choices(self, now_s: float) -> Iterable[Choice]:
        """Yield choices for waiting VMs, the oldest VM first.

        A choice counts as allocated when the next choice is made. A younger VM may be chosen while
        an older VM fits on no node.
        """
        fleet = self._fleet
        nodes = {node: fleet.candidate(node, now_s) for node in fleet.nodes}
        self._note_refusals(now_s)
        waiting = [
            fleet.vms[uid]
            for uid in (*fleet.unplaced, *self._declined_now())
            if not fleet.damaged.record_of(uid)
        ]
        # Within a round, nodes only lose room. After a VM that fits on no node, later VMs with an
        # equal Wait are not tried.
        hopeless: set[Wait] = set()
        for held in sorted(waiting, key=lambda one: (one.record.created_ns, one.record.uid)):
            record = held.record
            wait = wait_of(record, fleet.volumes)
            declined = self._declined.get(record.uid, {})
            if record.ending or (wait in hopeless and record.node == UNPLACED):
                continue
            others = [one for name, one in nodes.items() if name not in declined]
            found = place_waiting(record, wait, others)
            if not found.nodes:
                if record.node != UNPLACED:  # the VM leaves the node, which has refused the VM
                    yield Choice(held, UNPLACED, "")
                elif not declined:  # other VMs may still fit on a node that declined this VM
                    hopeless.add(wait)
                continue
            best = found.nodes[0]
            nodes[best] = with_vm(nodes[best], record)
            yield Choice(held, best, f"best of {len(found.nodes)}, {len(found.refused)} refused")

    def _note_refusals(self, now_s: float) -> None:
        """Remember refusals for DECLINED_S, so that the node is not tried again at once."""
        for uid in self._declined_now():
            self._declined.setdefault(uid, {})[self._fleet.vms[uid].record.node] = now_s
        for uid, nodes in list(self._declined.items()):
            fresh = {node: at_s for node, at_s in nodes.items() if now_s - at_s < DECLINED_S}
            if fresh and uid in self._fleet.vms:
                self._declined[uid] = fresh
            else:
                del self._declined[uid]

    def _declined_now(self) -> list[str]:
        """Return the VMs whose node refused the current assignment, and has released the VM."""
        found = []
        for uid in self._fleet.refused:
            held = self._fleet.vms.get(uid)
            status = self._fleet.last_status(held.record) if held is not None else None
            if held is None or status is None or held.record.ending:
                continue
            if status.refused and status.released and status.epoch == held.record.epoch:
                found.append(uid)
        return found

    async def _move(self, choice: Choice, tenure: LeaderTerm) -> None:
        record = choice.held.record.model_copy(update={"lease": tenure.check()})
        try:
            held = await self._moves.move(StoredVm(record, choice.held.revision), choice.node)
        except (ConflictError, NodeFullError):
            return  # the record changed or the node is full; a later round tries again
        except (BusError, VirtbusError) as error:
            log.warning(
                "placement of %s will be retried: %s",
                record.name,
                error,
                extra={"code": "place_retry", "uid": record.uid},
            )
            return
        if self._fleet.apply(held):
            self._watches.changed(record.uid)
        if held.record.node != UNPLACED:
            self._tell(held.record, choice.why)

    def _tell(self, record: VmRecord, why: str) -> None:
        self._events.emit(EventKind.VM_SCHEDULED, record, f"on {record.node}: {why}")
        log.info(
            "placed %s/%s on %s",
            record.namespace,
            record.name,
            record.node,
            extra={"code": "vm_placed", "uid": record.uid},
        )
