"""Gives up the volumes of a node that is forgotten, if the request names them."""

from collections.abc import Collection

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import has_data
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.errors import Code, Detail, VirtbusError

SHOWN = 20


class VolumeLosses:
    """Marks volumes as lost. A node is not forgotten until a request names each of its volumes."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._fleet = fleet
        self._writes = VolumeWrites(bus)

    def check(self, node: str, named: Collection[str]) -> None:
        """Raise 409 while the node has volumes that are not `named`, as NAMESPACE/NAME."""
        names = ["/".join(held.order()) for held in self._of(node) if has_data(held.record)]
        more = sorted(set(names) - set(named))
        if more:
            message = (
                f"{len(more)} volume(s) on {node} would be lost; name each to give it up "
                f"(`--lose-volume {more[0]}`), or start the node again"
            )
            details = tuple(
                Detail(path=f"volume/{name}", message="would be lost") for name in more[:SHOWN]
            )
            raise VirtbusError(Code.CONFLICT, "node_has_volumes", message, details=details)

    async def give_up(self, node: str) -> int:
        """Mark the volumes of a node as lost, and free those without data; return how many."""
        lost = 0
        for held in self._of(node):
            data = has_data(held.record)
            change = {"lost": True} if data else {"node": ""}
            try:
                await self._writes.replace(held, held.record.model_copy(update=change))
            except ConflictError:
                message = f"the volume {held.record.name} changed meanwhile; repeat"
                raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=500) from None
            lost += data
        return lost

    def _of(self, node: str) -> list[StoredVolume]:
        found = self._fleet.volumes.listed(None)
        return [one for one in found if one.record.node == node and not one.record.lost]
