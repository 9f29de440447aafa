"""What a node is, as users see it: one table over what it said, and for how long it is silent."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from virtbus.schemas.node import NodeRecord, NodeState

SUSPECT_AFTER_S = 10.0
"""Two beats and a half: what the node last said may no longer be so."""
DOWN_AFTER_S = 25.0
"""Longer than a bus election (9 s) plus a beat, or a leader change marks every node down."""
LEFT_FOR_S = 60.0
"""How long a node that left is shown; as long as its last record is on the bus."""
TOGETHER_S = 10.0
"""Nodes that were last heard within this of each other fell silent together."""
BRAKE_SHARE = 3
"""More than one in this many (and more than one) silent together: the bus or the net failed."""

BRAKE_ALARM = (
    "too many nodes fell silent together: nothing is done about them; look at the bus and the "
    "network between the hosts"
)


class NodeSeen(NamedTuple):
    """A node's last word, and when it came on this process's monotonic clock."""

    record: NodeRecord
    heard_s: float
    skew_s: float = 0.0
    kind: bytes = b""
    vms: int = 0
    """How many were promised on it then."""


class Signs(NamedTuple):
    """What is known of a node."""

    said: NodeState
    silence_s: float
    """For how long nothing came while the bus was there."""
    draining: bool = False
    braked: bool = False


ROWS: tuple[tuple[NodeState, Callable[[Signs], bool]], ...] = (
    (NodeState.LEFT, lambda one: one.said is NodeState.LEFT),
    (NodeState.DOWN, lambda one: one.silence_s > DOWN_AFTER_S and not one.braked),
    (NodeState.SUSPECT, lambda one: one.silence_s > SUSPECT_AFTER_S),
    (NodeState.RECOVERING, lambda one: one.said is NodeState.RECOVERING),
    (NodeState.DRAINING, lambda one: one.draining or one.said is NodeState.DRAINING),
    (NodeState.READY, lambda _: True),
)
"""The first row that holds. A brake keeps the silent ones at Suspect: nothing is done to them."""

UNHEARD = frozenset({NodeState.SUSPECT, NodeState.DOWN, NodeState.LEFT})
"""Such a node's agent is not there to be asked."""

UNCERTAIN = UNHEARD | {NodeState.RECOVERING}
"""What such a node last said of its VMs is shown as Unknown (I9): nobody compared it since."""

WHY_UNKNOWN: dict[NodeState, str] = {
    NodeState.SUSPECT: "{node} has not been heard for a while; the guest may still run",
    NodeState.DOWN: "{node} is down; the guest may still run, and is not started elsewhere "
    "before the node is fenced",
    NodeState.RECOVERING: "the agent of {node} has not yet compared its guests with their records; "
    "`virtbus node get {node}` says why",
    NodeState.LEFT: "the agent of {node} was stopped; the guest runs on unwatched",
}


def state_of(signs: Signs) -> NodeState:
    """The node's state."""
    return next(state for state, holds in ROWS if holds(signs))


def unheard(node: str) -> NodeRecord:
    """What stands for the record of a node that holds VMs and said nothing to this process."""
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
    """True when more than max(1, nodes / 3) fell silent together (design §6).

    `silent_since_s` is when each silent node was last heard.
    """
    since = sorted(silent_since_s)
    together, first = 0, 0
    for last, at_s in enumerate(since):
        while at_s - since[first] > TOGETHER_S:
            first += 1
        together = max(together, last - first + 1)
    return together > max(1, nodes / BRAKE_SHARE)
