"""Computes which nodes exceed their fair share of a stream that all nodes write to (ADR 0030).

nats-server limits a stream or a subject, but not the subjects of a node together. So the controller
with the fleet lease estimates the space that each node uses, from a sample, and removes messages of
nodes that exceed their share.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LOOK_AT = 0.25
"""Share of a stream's space. While less is used, nothing is trimmed."""
MOST, LEAST, TIMES_FAIR = 0.5, 1 / 16, 4
"""A node may use four times its fair share, at most half and at least a sixteenth of a stream."""
_OVERHEAD_BYTES = 64
"""Approximate overhead of a stored message in addition to subject and body."""
_NODE_TOKEN = 2
"""Index of the node in the subjects `virtbus.evt.<node>.…` and `$KV.st.<node>.…`."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A node that exceeds its share. It uses about `bytes`; its newest `keep` messages may stay."""

    node: str
    bytes: int
    keep: int


def limit(max_bytes: int, nodes: int) -> int:
    """Return how many bytes each of `nodes` nodes may use in a stream that holds `max_bytes`."""
    fair = TIMES_FAIR / max(nodes, 1)
    return int(max_bytes * min(MOST, max(LEAST, fair)))


def excess(
    sample: Iterable[tuple[str, int]], used_bytes: int, max_bytes: int, messages: int, nodes: int
) -> list[Excess]:
    """Return nodes above their limit, by a sample of (subject, body size) over the whole stream.

    `keep` is the number of messages that use about half of the limit.
    """
    by_node: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for subject, size in sample:
        node = subject.split(".")[_NODE_TOKEN]
        by_node[node] += size + len(subject) + _OVERHEAD_BYTES
        counted[node] += 1
    total = by_node.total()
    if len(by_node) < 2 and nodes < 2:
        return []  # no other node needs the space
    most = limit(max_bytes, nodes)
    found = []
    for node, sampled in by_node.items():
        taken = used_bytes * sampled // total
        if taken > most:
            own = messages * counted[node] // counted.total()
            found.append(Excess(node, taken, own * most // (2 * taken)))
    return found
