"""Resolves the network names in a VM's spec; keeps the networks from removal after the commit."""

from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.network_changes import kept
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.network_writes import NetworkWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.network_object import BUILT_IN, EVERYWHERE, NetworkTarget
from virtbus.schemas.vm import VmRecord, VmSpec

COMMIT_MOST_S = 5.0
"""Time limit of a write that adds networks to a VM: from the first read of a network to the commit.
"""


class NetworkTargets:
    """Resolves network names. A namespace's own network precedes a network of all namespaces."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._fleet = fleet
        self._events = events
        self._writes = NetworkWrites(bus)

    async def of_spec(
        self, spec: VmSpec, namespace: str, before: VmRecord | None = None
    ) -> dict[str, NetworkTarget]:
        """Return the network objects of a spec, by name.

        Names without an object are left out: nodes look for these names in their CNI conflists. A
        name that is also in the record `before` keeps its meaning there.

        Raises:
            VirtbusError:
                409 `deleting`: a network is being deleted; the details name the field.
                422 `unreadable`: the record of a network is unreadable.
        """
        wanted = network_names(spec)
        known = set[str]() if before is None else network_names(before.spec)
        there = {} if before is None else before.network_targets
        found = {name: target for name, target in there.items() if name in wanted}
        for index, network in enumerate(spec.networks):
            name = network.network
            if name == BUILT_IN or name in found or name in known:
                continue
            target = await self._find(name, namespace, index)
            if target is not None:
                found[name] = target
        return found

    async def _find(self, name: str, namespace: str, index: int) -> NetworkTarget | None:
        offered = any(name in seen.record.networks for seen in self._fleet.nodes.values())
        for scope in (namespace, EVERYWHERE):
            key = subjects.network_record(scope, name)
            # A name that a node offers is usually a CNI network: without a cached object, skip the
            # round trip. For other names, the bus may have a network that the cache lacks so far.
            if offered and not self._fleet.networks.at(key) and not self._fleet.damaged.has(key):
                continue
            held = await self._writes.latest(scope, name)
            if held is None:
                continue
            if held.record.deleting:
                raise _deleting(name, f"spec.networks[{index}].network")
            return held.record.target
        return None

    async def keep(self, record: VmRecord) -> None:
        """Take back the delete marks of the networks of a committed record (ADR 0055).

        Raises:
            VirtbusError:
                409 `deleting`: a network was removed meanwhile.
                503: too many races were lost.
        """
        for target in record.network_targets.values():
            await self._keep(target, record)

    async def _keep(self, target: NetworkTarget, record: VmRecord) -> None:
        for _ in range(ATTEMPTS):
            held = await self._writes.latest(target.namespace, target.name)
            if held is None or held.record.uid != target.uid:
                raise _deleting(target.name, "spec.networks")
            if not held.record.deleting:
                return
            user = f"{record.namespace}/{record.name}"
            with suppress(ConflictError):
                held = await self._writes.replace(held, kept(held.record, [user]))
                self._fleet.networks.apply(held)
                why = held.record.kept_for
                self._events.named(EventKind.NETWORK_KEPT, held.record, held.revision, why)
                return
        raise contended(f"the network {target.name}")


def network_names(spec: VmSpec) -> set[str]:
    """Return the names of all networks in a spec, with or without a network object."""
    return {network.network for network in spec.networks}


def _deleting(name: str, path: str) -> VirtbusError:
    message = f"the network {name} is being deleted; choose another one"
    detail = Detail(path=path, message=f"{name} is being deleted")
    return VirtbusError(Code.CONFLICT, "deleting", message, details=(detail,))
