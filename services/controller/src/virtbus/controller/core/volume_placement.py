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
    """All that decides where a waiting VM fits. VMs with equal values fit on the same nodes."""

    demand: Demand
    powered: bool
    """The VM needs CPU and memory now."""
    strict: bool
    home: Home | None


def home_of(volumes: Iterable[VolumeRecord]) -> Home | None:
    """Return the home of the volumes; None without volumes.

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
    """Return all that decides where a VM fits. The node of its volumes comes from the cache."""
    home = _known_home(record, volumes)
    return Wait(demand_of_vm(record), takes_room(record), record.reserved, home)


def place_waiting(record: VmRecord, wait: Wait, nodes: Sequence[Candidate]) -> Placement:
    """Return the placement of a waiting VM: see `place_near`."""
    how = {"powered": wait.powered, "strict": wait.strict}
    return place_near(record.spec, nodes, wait.home, want=wait.demand, **how)


def _known_home(record: VmRecord, volumes: Volumes) -> Home | None:
    """Return the home of a VM's volumes as cached, or of the snapshot that it is a clone of.

    None: the VM has no cached volume and no such snapshot.
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
    """Return only the node of `home`, if it is among `nodes`; all of them if `home` has no node."""
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

    The result also has a reason for each other node.
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
