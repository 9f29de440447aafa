"""Finds the network objects that a VM's spec names, and looks at them again after its commit."""

from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.network_changes import kept
from virtbus.controller.core.vm_keys import StoredNetwork
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import BUILT_IN, EVERYWHERE, NetworkTarget
from virtbus.schemas.vm import VmRecord, VmSpec

COMMIT_MOST_S = 5.0
"""The time in which a create with network objects commits, from before its first look at them."""


class NetworkTargets:
    """The meanings of network names: a namespace's own networks precede those of all."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._fleet = fleet
        self._writes = NetworkWrites(bus)

    async def of_spec(self, spec: VmSpec, namespace: str) -> dict[str, NetworkTarget]:
        """Return the network objects of a spec, by name.

        Other names are left to the conflists of nodes.

        Raises:
            VirtbusError: 409 `deleting` with the field; 422 `unreadable`.
        """
        found: dict[str, NetworkTarget] = {}
        for index, network in enumerate(spec.networks):
            name = network.network
            if name == BUILT_IN or name in found:
                continue
            target = await self._find(name, namespace, index)
            if target is not None:
                found[name] = target
        return found

    async def _find(self, name: str, namespace: str, index: int) -> NetworkTarget | None:
        offered = any(name in seen.record.networks for seen in self._fleet.nodes.values())
        for scope in (namespace, EVERYWHERE):
            key = subjects.network_record(scope, name)
            # a conflist's name costs no round trip; a network may be younger than the cache
            if offered and not self._fleet.networks.at(key) and not self._fleet.damaged.has(key):
                continue
            held = await self._writes.latest(scope, name)
            if held is None:
                continue
            if held.record.deleting:
                raise _deleting(name, f"spec.networks[{index}].network")
            return held.record.target
        return None

    async def keep(self, record: VmRecord) -> list[StoredNetwork]:
        """Take back the delete marks of the networks of a committed record; return those networks.

        Raises:
            VirtbusError: 409 `deleting` if a network has ended meanwhile; 503 too many lost races.
        """
        marked = []
        for target in record.network_targets.values():
            held = await self._keep(target, record)
            if held is not None:
                self._fleet.networks.apply(held)
                marked.append(held)
        return marked

    async def _keep(self, target: NetworkTarget, record: VmRecord) -> StoredNetwork | None:
        for _ in range(ATTEMPTS):
            held = await self._writes.latest(target.namespace, target.name)
            if held is None or held.record.uid != target.uid:
                raise _deleting(target.name, "spec.networks")
            if not held.record.deleting:
                return None
            user = f"{record.namespace}/{record.name}"
            with suppress(ConflictError):
                return await self._writes.replace(held, kept(held.record, [user]))
        raise contended(f"the network {target.name}")


def _deleting(name: str, path: str) -> VirtbusError:
    message = f"the network {name} is being deleted; create the VM with another one"
    detail = Detail(path=path, message=f"{name} is being deleted")
    return VirtbusError(Code.CONFLICT, "deleting", message, details=(detail,))
