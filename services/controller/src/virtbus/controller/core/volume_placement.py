"""Places a VM on the node that has the data of its volumes."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from virtbus.controller.core.allocations import takes_room
from virtbus.controller.core.demand import Demand, demand_of_vm
from virtbus.controller.core.placement import Candidate, Placement, place
from virtbus.controller.core.pools import Needs, needs_of, why_not
from virtbus.controller.core.volumes import Volumes
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSpec
from virtbus.schemas.volume import VolumeRecord


class Home(NamedTuple):
    """The node of a VM's volumes (empty: none yet), the name of one of them, and their pools."""

    node: str
    volume: str
    needs: Needs = ()


class Wait(NamedTuple):
    """All that decides which nodes a waiting VM fits on. VMs with equal values fit equal nodes."""

    demand: Demand
    powered: bool
    """True if the VM needs CPUs and memory now."""
    strict: bool
    home: Home | None


def home_of(volumes: Iterable[VolumeRecord]) -> Home | None:
    """Return the home of the volumes; None if there are no volumes.

    Raises:
        VirtbusError: 409 `volumes_apart`: the volumes are on several nodes.
    """
    volumes = tuple(volumes)
    homes = {one.node: Home(one.node, one.name) for one in volumes if one.node}
    if len(homes) > 1:
        placed = ", ".join(f"{one.volume} on {one.node}" for one in homes.values())
        message = f"no node has all of its volumes: {placed}; use volumes of one node"
        details = tuple(
            Detail(path=f"volume/{one.volume}", message=f"is on {one.node}")
            for one in homes.values()
        )
        raise VirtbusError(Code.CONFLICT, "volumes_apart", message, details=details)
    home = next(iter(homes.values()), Home("", ""))
    return home._replace(needs=needs_of(volumes)) if volumes else None


def wait_of(record: VmRecord, volumes: Volumes) -> Wait:
    """Return all that decides which nodes a VM fits on; its volumes' node comes from the cache."""
    home = _known_home(record, volumes)
    return Wait(demand_of_vm(record), takes_room(record), record.reserved, home)


def place_waiting(record: VmRecord, wait: Wait, nodes: Sequence[Candidate]) -> Placement:
    """Return the placement of a waiting VM, as `place_near` does."""
    how = {"powered": wait.powered, "strict": wait.strict}
    return place_near(record.spec, nodes, wait.home, want=wait.demand, **how)


def _known_home(record: VmRecord, volumes: Volumes) -> Home | None:
    """Return the home of a VM from its cached volumes, or from the snapshot that it is a clone of.

    The result is None if the VM has neither a cached volume nor such a snapshot.
    """
    known = []
    for ref in record.volume_refs.values():
        held = volumes.get(ref.namespace, ref.name)
        if held is not None and held.record.uid == ref.uid:
            known.append(held.record)
    origin = record.origin
    begin = Home("", "") if origin is None else Home(origin.node, origin.snapshot.name)
    placed = next((Home(one.node, one.name) for one in known if one.node), begin)
    return placed._replace(needs=needs_of(known)) if known or placed.node else None


def near(nodes: Sequence[Candidate], home: Home | None) -> Sequence[Candidate]:
    """Return only the node of `home`, if it is among `nodes`; all nodes if `home` has no node."""
    if home is None or not home.node:
        return nodes
    return [one for one in nodes if one.record.node == home.node]


def place_near(
    spec: VmSpec,
    nodes: Sequence[Candidate],
    home: Home | None,
    *,
    powered: bool = True,
    strict: bool = False,
    want: Demand | None = None,
) -> Placement:
    """Return the result of `place` for the nodes that can serve the VM's volumes.

    The result also has reasons for all other nodes.
    """
    find = partial(place, spec, powered=powered, strict=strict, want=want)
    if home is None:
        return find(nodes)
    there = near(nodes, home)
    lacking = {one.record.node: why_not(one.pools, home.needs) for one in there}
    lacking = {node: why for node, why in lacking.items() if why}
    able = [one for one in there if one.record.node not in lacking]
    found = find(able)
    found = Placement(found.fit, {**found.refused, **lacking})
    if not home.node:
        return found
    why = f"does not have the volume {home.volume}, which is on {home.node}"
    refused = {one.record.node: why for one in nodes if one.record.node != home.node}
    if len(refused) == len(nodes):
        refused[home.node] = f"has the volume {home.volume}, and is not available"
    return Placement(found.fit, {**refused, **found.refused})
