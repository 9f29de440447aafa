"""Labels Kubernetes Nodes that have the name of a virtbus node: KubeVirt's label and heartbeat.

Tools find schedulable nodes by them; virtbus itself places VMs. The labels are removed when virtbus
has forgotten the node.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from virtbus.kubebridge.core.moments import moment, stamp
from virtbus.kubebridge.core.plain import Object, text
from virtbus.schemas.node import NodeState, NodeView

SCHEDULABLE = "kubevirt.io/schedulable"
HEARTBEAT = "kubevirt.io/heartbeat"
OURS = "virtbus.io/node"
"""The label of Nodes that we marked: no other is touched."""
BEAT = timedelta(seconds=60)
FORGOTTEN = timedelta(minutes=5)
"""After the last beat: a list that lacks a node may be one of a bus that just came back."""
SILENT = frozenset({NodeState.SUSPECT, NodeState.DOWN, NodeState.LEFT})


class Mark(NamedTuple):
    """A merge patch of a Node; that there is none of the name is no failure."""

    node: str
    patch: dict[str, Any]


def takes(view: NodeView) -> bool:
    """True where the node takes VMs now."""
    return view.state is NodeState.READY and not (view.wish is not None and view.wish.closed)


def marks(
    views: Iterable[NodeView],
    there: Mapping[str, Object],
    absent: Collection[str],
    now: datetime,
) -> list[Mark]:
    """What is to be written; nothing where all is told and fresh.

    `there` are the Nodes that bear our mark, by name; of the `absent` it is known that Kubernetes
    has no Node of the name.
    """
    found, known = [], set()
    for view in views:
        known.add(view.node)
        if view.node in absent and view.node not in there:
            continue
        if one := _mark(view, there.get(view.node), now):
            found.append(one)
    return found + [
        Mark(name, _metadata(None, None, None))
        for name, node in there.items()
        if name not in known and _since(node, now) > FORGOTTEN
    ]


def _mark(view: NodeView, node: Object | None, now: datetime) -> Mark | None:
    label = "true" if takes(view) else "false"
    beats = view.state not in SILENT
    if node is None:
        return Mark(view.node, _metadata(label, "true", stamp(now)))
    fresh = not beats or _since(node, now) < BEAT
    if fresh and text(node, "metadata", "labels", SCHEDULABLE) == label:
        return None
    beat = now if beats else now - _since(node, now)
    return Mark(view.node, _metadata(label, "true", stamp(beat)))


def _since(node: Object, now: datetime) -> timedelta:
    """How long ago the last beat was; a Node without a beat had it long ago."""
    last = moment(text(node, "metadata", "annotations", HEARTBEAT))
    return now - last if last is not None else 2 * FORGOTTEN


def _metadata(label: str | None, ours: str | None, beat: str | None) -> dict[str, Any]:
    labels = {SCHEDULABLE: label, OURS: ours}
    return {"metadata": {"labels": labels, "annotations": {HEARTBEAT: beat}}}
