"""Marks volumes and snapshots of a forgotten node as lost, if the request names them."""

from collections.abc import Collection

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import has_data_on_node
from virtbus.controller.core.volume_holds import without_node
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.api import NodeForget
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.volume import VolumeRecord

SHOWN = 20


class VolumeLosses:
    """Marks volumes and snapshots as lost.

    `node.forget` must name each volume and snapshot that has data on the node.
    """

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._fleet = fleet
        self._writes = VolumeWrites(bus)
        self._snapshots = SnapshotWrites(bus)

    def check(self, want: NodeForget) -> None:
        """Raise 409 `node_has_volumes` or `node_has_snapshots` for data on the node.

        Data of volumes and snapshots that the request names is permitted.
        """
        held = [
            one
            for one in self._of(want.node)
            if one.record.node == want.node and has_data_on_node(one.record)
        ]
        volumes = ["/".join(one.order()) for one in held]
        _refuse("volume", want.node, volumes, want.lose_volumes)
        snapshots = ["/".join(held.order()) for held in self._fleet.volumes.snapshots.on(want.node)]
        _refuse("snapshot", want.node, snapshots, want.lose_snapshots)

    async def give_up(self, node: str) -> int:
        """Mark the volumes and snapshots that have data on a node as lost.

        A volume without data on the node, such as a volume on a server, only loses its link to the
        node. Return the number of lost volumes. Raise 503 `contended` if an object changes
        meanwhile.
        """
        lost = 0
        for held in self._of(node):
            data = held.record.node == node and has_data_on_node(held.record)
            now = without_node(held.record, node)
            if data:
                now = held.record.model_copy(update={"lost": True})
            try:
                await self._writes.replace(held, now)
            except ConflictError:
                message = f"the volume {held.record.name} changed meanwhile; repeat"
                raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=500) from None
            lost += data
        for one in self._fleet.volumes.snapshots.on(node):
            try:
                await self._snapshots.replace(one, one.record.model_copy(update={"lost": True}))
            except ConflictError:
                message = f"the snapshot {one.record.name} changed meanwhile; repeat"
                raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=500) from None
        return lost

    def _of(self, node: str) -> list[StoredVolume]:
        found = self._fleet.volumes.listed(None)
        return [one for one in found if _is_on(node, one.record) and not one.record.lost]


def _is_on(node: str, record: VolumeRecord) -> bool:
    """Return True if the record names the node, as the volume's node or as the node of a hold."""
    return record.node == node or any(hold.node == node for hold in record.holds.values())


def _refuse(what: str, node: str, there: Collection[str], named: Collection[str]) -> None:
    """Raise 409 if `named` lacks an object of `there`; both contain NAMESPACE/NAME."""
    more = sorted(set(there) - set(named))
    if more:
        message = (
            f"{len(more)} {what}(s) on {node} would be lost; name each to give it up "
            f"(`--lose-{what} {more[0]}`), or start the node again"
        )
        details = tuple(
            Detail(path=f"{what}/{name}", message="would be lost") for name in more[:SHOWN]
        )
        raise VirtbusError(Code.CONFLICT, f"node_has_{what}s", message, details=details)
