"""Ends the holds that deleted VMs still have on volumes, as a leader task (ADR 0045).

Usually one batch ends a VM's record and its holds. A hold remains if a person removed an unreadable
record, or if the bus was restored from a backup that lacks the VM. In these cases, only the node
that the hold names knows if a guest still uses the volume.
"""

import asyncio
import logging
from collections.abc import Collection

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_holds import freed, hold_node, ref_of
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import ended
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import KnownRecords, RecordsRead
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ROUND_S = 30.0
ASK_S = 5.0
Hold = tuple[str, StoredVolume]
"""The uid of a VM, and a volume that the VM holds."""


class HoldSweep:
    """Ends a hold if its VM has no record, and the hold's node, if any, has released the VM.

    After a crash or a lost answer, the hold remains, and the next round checks it again.
    """

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._writes = VolumeWrites(bus)

    async def run(self, tenure: LeaderTerm) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            for node, holds in self._suspects().items():
                try:
                    await self._sweep(node, holds, tenure)
                except (BusError, VirtbusError) as error:
                    extra = {"code": "holds_remain", "node": node}
                    log.info("%d hold(s) will be checked again: %s", len(holds), error, extra=extra)

    def _suspects(self) -> dict[str, list[Hold]]:
        """Return, by node, the holds whose VM has no cached record.

        The node is "" for a volume without data: no guest has used it, or its node is forgotten.
        """
        found: dict[str, list[Hold]] = {}
        for vm, held in self._fleet.volumes.held_outside(self._fleet.vms):
            found.setdefault(hold_node(held.record, vm), []).append((vm, held))
        return found

    async def _sweep(self, node: str, holds: list[Hold], tenure: LeaderTerm) -> None:
        """End the holds of VMs without a record; raises BusError, VirtbusError.

        A concurrent create of the VM writes the volume too. Then the write of this sweep conflicts.
        """
        gone = [(vm, held) for vm, held in holds if await self._gone(vm)]
        left = await self._left(node) if gone and node else {vm for vm, _ in gone}
        for vm, held in gone:
            if vm in left:
                tenure.check()
                await self._free(held, vm)

    async def _gone(self, uid: str) -> bool:
        return ended(await self._bus.get(subjects.vm_anywhere(uid)))

    async def _left(self, node: str) -> Collection[str]:
        """Return the uids of the VMs that the node has removed; raises as `Bus.request`."""
        subject = subjects.rpc(node, "agent", "records")
        answer = await self._bus.request(subject, RecordsRead(limit=1), timeout_s=ASK_S)
        return validate(KnownRecords, answer).removed

    async def _free(self, held: StoredVolume, vm: str) -> None:
        record = freed(held, ref_of(held.record), vm)
        if record is None:
            return
        try:
            free = await self._writes.replace(held, record)
        except ConflictError:
            return  # the volume changed meanwhile
        self._fleet.volumes.apply(free)
        why = f"free: VM {vm} has no record, and its node has released it"
        self._events.named(EventKind.VOLUME_UPDATED, record, free.revision, why)
        extra = {"code": "hold_ended", "uid": record.uid, "vm": vm}
        log.warning("the hold of volume %s ended: its VM is gone", record.name, extra=extra)
