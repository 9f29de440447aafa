"""Builds the API's views of the nodes of the fleet."""

from collections.abc import Iterator

from virtbus.controller.core.allocations import NOTHING
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import NodeSeen, unheard
from virtbus.schemas.node import NodeView


def node_views(fleet: Fleet, now_s: float) -> Iterator[NodeView]:
    """Yield the view of each known node, ordered by name."""
    for node in fleet.known_nodes():
        seen = fleet.nodes.get(node) or NodeSeen(unheard(node), fleet.quiet_since_s)
        load = fleet.promises.on.get(node, NOTHING)
        yield NodeView(
            **vars(seen.record) | {"state": fleet.node_state(node, now_s)},
            images=len(fleet.images.of(node).keys),
            pools=tuple(fleet.pools.of(node).values()),
            vms=load.vms,
            committed_vcpus=load.vcpus,
            committed_memory_bytes=load.memory_bytes,
            age_s=round(now_s - seen.heard_s, 1),
            skew_s=round(seen.skew_s, 3),
            node_spec=fleet.node_spec_of(node),
            **fleet.hosts.shown(node),
        )
