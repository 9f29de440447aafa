"""Computes which nodes use more than their share of a stream that all nodes write (ADR 0030).

nats-server can limit a stream or a subject, but not all subjects of a node together. So the
controller with the fleet lease estimates each node's usage from a sample. It then removes messages
of the nodes that exceed their share.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

LOOK_AT = 0.25
"""Fraction of a stream's space. While less is used, no message is removed."""
MOST, LEAST, TIMES_FAIR = 0.5, 1 / 16, 4
"""A node may use four times its fair share, limited to between 1/16 and 1/2 of the stream."""
_OVERHEAD_BYTES = 64
"""Approximate size that a stored message needs besides its subject and body."""
_NODE_TOKEN = 2
"""Index of the node in the subjects `virtbus.evt.<node>.…` and `$KV.st.<node>.…`."""


class Excess(NamedTuple):
    """A node above its limit. It uses about `bytes`; its newest `keep` messages may stay."""

    node: str
    bytes: int
    keep: int


def limit(max_bytes: int, nodes: int) -> int:
    """Return how many bytes each of `nodes` nodes may use in a stream of `max_bytes`."""
    fair = TIMES_FAIR / max(nodes, 1)
    return int(max_bytes * min(MOST, max(LEAST, fair)))


def excess(
    sample: Iterable[tuple[str, int]], used_bytes: int, max_bytes: int, messages: int, nodes: int
) -> list[Excess]:
    """Return the nodes above their limit, from a sample of the whole stream.

    `sample` has the subject and body size of messages. Each result's `keep` is the number of
    messages that use about half of the limit.
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
