"""Handles `virtbus.api.v1.volume.move`: begins or cancels the move of a volume (ADR 0063)."""

import asyncio
from collections.abc import Awaitable, Callable

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import off_moves, volume_moves
from virtbus.controller.core.evacuation import EvacuationTargets
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import with_request
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_moves import Goal
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.off_moves import OffMoves
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.volume_api import VolumeApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import VolumeMoveTo, VolumeView
from virtbus.schemas.wire import validate


class VolumeMoveApi:
    """Writes the move into the volume's record; the leader task `VolumeMoves` moves the data."""

    def __init__(
        self, bus: Bus, fleet: Fleet, volumes: VolumeApi, room: OperationRoom, off: OffMoves
    ) -> None:
        self._fleet = fleet
        self._volumes = volumes
        self._room = room
        self._off = off
        self._writes = VolumeWrites(bus)
        self._sources = bus.sources

    async def move(self, request: Request) -> VolumeView:
        want = validate(VolumeMoveTo, request.data)
        node = self._volumes.node(want.node)

        def goal_of(record: VolumeRecord) -> Goal:
            pools = self._fleet.pools.of(node or record.node)
            return volume_moves.goal_of(record, node, want.pool, pools)

        def change(record: VolumeRecord) -> VolumeRecord:
            return self._begun(record, goal_of(record))

        async def find() -> StoredVolume:
            held = await self._volumes.find(want, request.account)
            if goal_of(held.record) == volume_moves.place_of(held.record):
                await self._off.refuse_late(held.record)
            return held

        asked = (await find()).record
        leaves = goal_of(asked) != volume_moves.place_of(asked)
        if leaves and not asked.has_open_move:  # only a new move begins further operations
            self._room.refuse_more(want.namespace)
        if asked.holder and leaves:
            return self._volumes.show(await self._off_move(find, goal_of, request))
        held, changed = await self._writes.change(find, change, request)
        if changed:
            self._volumes.tell(EventKind.VOLUME_UPDATED, held, "")
        return self._volumes.show(held)

    def _begun(self, record: VolumeRecord, goal: Goal, *, is_off: bool = False) -> VolumeRecord:
        """Return the volume with a move to `goal`.

        Raises the errors of `volume_moves.begun` and `volume_moves.refuse_pool`.
        """
        export, fill = self._sources.uuid7(), self._sources.uuid7()
        moved = volume_moves.begun(record, goal, export, fill, is_off=is_off)
        if moved != record and (moved.is_moving or moved.node != record.node):
            pools = self._fleet.pools.of(goal.node or record.node)
            volume_moves.refuse_pool(record, goal.pool, pools)
        return moved

    # --- a volume that a VM holds -----------------------------------------------------------
    async def _off_move(
        self,
        find: Callable[[], Awaitable[StoredVolume]],
        goal_of: Callable[[VolumeRecord], Goal],
        request: Request,
    ) -> StoredVolume:
        """Begin the move of a volume that a VM holds, with retries after conflicts.

        Raises VirtbusError as `_with_vm`, and 503 `contended` if too many races were lost.
        """
        for _ in range(ATTEMPTS):
            held = await find()
            if request.id in held.record.requests:
                return held
            if not held.record.holder:
                break
            refuse_late(request.deadline_s)
            try:
                return await self._with_vm(held, goal_of(held.record), request)
            except ConflictError:
                continue
        raise contended("the volume or its VM")

    async def _with_vm(self, held: StoredVolume, goal: Goal, request: Request) -> StoredVolume:
        """Begin the move of a volume whose VM is off; return the volume.

        A move to another node moves the VM and all of its volumes (ADR 0087).

        Raises:
            ConflictError: the VM or a volume has changed.
            VirtbusError: 429 `no_capacity`: the other node has no room for the VM. Also the errors
                of `_begun`, `refuse_up`, `refuse_changing` and `refuse_leaving`.
        """
        first = with_request(self._begun(held.record, goal, is_off=True), held.record, request.id)
        there = await self._off.holder(held.record)
        known = there.record if there is not None else None
        status = self._fleet.last_status(known) if known is not None else None
        vm = off_moves.refuse_up(held.record, known, status)
        off_moves.refuse_changing(vm, self._fleet.operations.open_of(vm.uid))
        moving = [] if first == held.record else [StoredVolume(first, held.revision)]
        if goal.node != vm.node:
            off_moves.refuse_leaving(vm)
            self._refuse_target(vm, goal.node)
            for other in await self._off.volumes_of(vm):
                record = other.record
                if record.uid == first.uid:
                    continue
                place = Goal(goal.node, record.spec.pool, record.pool_kind)
                begun = self._begun(record, place, is_off=True)
                moving += [] if begun == record else [StoredVolume(begun, other.revision)]
        if there is None or not moving:
            return held
        await self._off.begin(there, moving)
        for one in moving:
            new = await self._writes.latest(one.record.namespace, one.record.name)
            if new is not None:
                self._volumes.tell(EventKind.VOLUME_UPDATED, new, "")
                held = new if new.record.uid == first.uid else held
        return held

    def _refuse_target(self, vm: VmRecord, node: str) -> None:
        """Raise 429 `no_capacity` if `node` has no room for the VM now."""
        places = EvacuationTargets(self._fleet.candidates(asyncio.get_running_loop().time()))
        _, why = places.find(vm.model_copy(update={"evacuation_target": node}))
        if why:
            raise VirtbusError(Code.EXHAUSTED, "no_capacity", why, after_ms=5000)
