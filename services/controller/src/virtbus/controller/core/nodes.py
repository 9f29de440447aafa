"""Decides a node's state from its last report and the length of its silence."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeRecord, NodeSpec, NodeState

SUSPECT_AFTER_S = 10.0
"""A node is Suspect after this silence, because its last report may be outdated. Heartbeats are
4 s apart."""
DOWN_AFTER_S = 25.0
"""A node is Down after this silence. The time is longer than a leader election of the bus (9 s) and
a heartbeat interval together. So an election does not mark every node as Down."""
LEFT_FOR_S = 60.0
"""A node that left is shown for this time, which is also the lifetime of its heartbeat key."""
TOGETHER_S = 10.0
"""Nodes fell silent together if their last heartbeats arrived within this time of each other."""
BRAKE_SHARE = 3
"""The brake is set if more than n/BRAKE_SHARE of n nodes, and more than one, fell silent together.
The bus or the network has then probably failed."""

BRAKE_ALARM = (
    "too many nodes fell silent together: nothing is done about them; look at the bus and the "
    "network between the hosts"
)


class NodeSeen(NamedTuple):
    """A node's last report, and the time of its arrival on this process's monotonic clock."""

    record: NodeRecord
    heard_s: float
    skew_s: float = 0.0
    kind: bytes = b""
    vms: int = 0
    """Number of VMs that were allocated to the node when the report arrived."""


class NodeSignals(NamedTuple):
    """The inputs of the state table."""

    reported: NodeState
    """The state in the node's last heartbeat."""
    silence_s: float
    """Time without a heartbeat from the node, counted while the bus was reachable."""
    draining: bool = False
    braked: bool = False


ROWS: tuple[tuple[NodeState, Callable[[NodeSignals], bool]], ...] = (
    (NodeState.LEFT, lambda one: one.reported is NodeState.LEFT),
    (NodeState.DOWN, lambda one: one.silence_s > DOWN_AFTER_S and not one.braked),
    (NodeState.SUSPECT, lambda one: one.silence_s > SUSPECT_AFTER_S),
    (NodeState.RECOVERING, lambda one: one.reported is NodeState.RECOVERING),
    (NodeState.DRAINING, lambda one: one.draining or one.reported is NodeState.DRAINING),
    (NodeState.READY, lambda _: True),
)
"""The first matching row decides. While the brake is on, silent nodes stay Suspect, and the
controller does not act on them."""

UNHEARD = frozenset({NodeState.SUSPECT, NodeState.DOWN, NodeState.LEFT})
"""States in which the node's agent does not answer requests."""

UNCERTAIN = UNHEARD | {NodeState.RECOVERING}
"""States of a node in which its VMs are shown as Unknown, because their statuses may be outdated
(invariant I9)."""

WHY_UNKNOWN: dict[NodeState, str] = {
    NodeState.SUSPECT: "{node} has not been heard for a while; the guest may still run",
    NodeState.DOWN: "{node} is down; the guest may still run, and is not started elsewhere "
    "before the node is fenced",
    NodeState.RECOVERING: "the agent of {node} has not yet compared its guests with their records; "
    "`virtbus node get {node}` says why",
    NodeState.LEFT: "the agent of {node} was stopped; the guest keeps running unobserved",
}


def node_not_found(node: str) -> VirtbusError:
    """Return the error 404 for a node that the fleet does not have."""
    message = f"there is no node {node}; `virtbus node list` shows what there is"
    return VirtbusError(Code.NOT_FOUND, "node_not_found", message)


def state_of(signs: NodeSignals) -> NodeState:
    """Return the node's state."""
    if signs.silence_s <= SUSPECT_AFTER_S:  # no row distinguishes shorter silences
        signs = signs._replace(silence_s=0.0)
    return _state_of(signs)


@lru_cache(maxsize=64)  # a create shows the VM three times, nearly always with the same signals
def _state_of(signs: NodeSignals) -> NodeState:
    return next(state for state, holds in ROWS if holds(signs))


def unheard(node: str) -> NodeRecord:
    """Return a placeholder record for a known node that has sent no heartbeat."""
    return NodeRecord(
        node=node,
        hostname="",
        instance="",
        state=NodeState.RECOVERING,
        cpus=0,
        memory_bytes=0,
        accelerators=(),
        networks=(),
    )


def brake(silent_since_s: Iterable[float], nodes: int) -> bool:
    """Return True if more than max(1, nodes / 3) of the fleet's `nodes` fell silent together.

    `silent_since_s` has the time of each silent node's last heartbeat.
    """
    since = sorted(silent_since_s)
    together, first = 0, 0
    for last, at_s in enumerate(since):
        while at_s - since[first] > TOGETHER_S:
            first += 1
        together = max(together, last - first + 1)
    return together > max(1, nodes / BRAKE_SHARE)


@lru_cache(maxsize=1024)
def unset_spec(node: str) -> NodeSpec:
    """Return the spec of a node that has no stored spec."""
    return NodeSpec(node=node)
