"""Handles `virtbus.api.v1.volume.move`: begins the move of a volume, or gives it up (ADR 0063)."""

from virtbus.bus.client.ports import Bus, Request
from virtbus.controller.core import volume_moves
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.volume_api import VolumeApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.events import EventKind
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import VolumeMoveTo, VolumeView
from virtbus.schemas.wire import validate


class VolumeMoveApi:
    """Writes the move into the volume's record. The leader carries it out."""

    def __init__(self, bus: Bus, fleet: Fleet, volumes: VolumeApi, room: OperationRoom) -> None:
        self._fleet = fleet
        self._volumes = volumes
        self._room = room
        self._writes = VolumeWrites(bus)
        self._sources = bus.sources

    async def move(self, request: Request) -> VolumeView:
        want = validate(VolumeMoveTo, request.data)
        node = self._volumes.node(want.node)
        self._room.refuse_more(want.namespace)
        export, fill = self._sources.uuid7(), self._sources.uuid7()

        def change(record: VolumeRecord) -> VolumeRecord:
            pools = self._fleet.pools.of(node or record.node)
            goal = volume_moves.goal_of(record, node, want.pool, pools)
            moved = volume_moves.begun(record, goal, export, fill)
            if moved.is_moving or moved.node != record.node:
                volume_moves.refuse_pool(record, goal.pool, pools)
            return moved

        held, changed = await self._writes.change(
            lambda: self._volumes.find(want, request.account), change, request
        )
        if changed:
            self._volumes.tell(EventKind.VOLUME_UPDATED, held, "")
        return self._volumes.show(held)
