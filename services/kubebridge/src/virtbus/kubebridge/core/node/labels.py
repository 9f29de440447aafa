"""Labels the Kubernetes Nodes of virtbus nodes with KubeVirt's label and heartbeat.

A Node and a virtbus node belong together if they have the same name. Tools find schedulable nodes
by the label; virtbus itself places VMs. The label is removed once virtbus has forgotten the node.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.moments import moment, stamp
from virtbus.kubebridge.core.objects.plain import Object, text
from virtbus.schemas.node import NodeState, NodeView

SCHEDULABLE = "kubevirt.io/schedulable"
HEARTBEAT = "kubevirt.io/heartbeat"
OURS = "virtbus.io/node"
"""The label of Nodes that the bridge marked. It touches no others."""
BEAT = timedelta(seconds=60)
FORGOTTEN = timedelta(minutes=5)
"""Time after the last heartbeat before the mark is removed. A bus that just came back may list no
nodes.
"""
SILENT = frozenset({NodeState.SUSPECT, NodeState.DOWN, NodeState.LEFT})


class Mark(NamedTuple):
    """A merge patch of a Node. A missing Node is not an error."""

    node: str
    patch: dict[str, Any]


def takes(view: NodeView) -> bool:
    """Return True if the node takes VMs now."""
    return view.state is NodeState.READY and not (view.wish is not None and view.wish.closed)


def marks(
    views: Iterable[NodeView],
    there: Mapping[str, Object],
    absent: Collection[str],
    now: datetime,
) -> list[Mark]:
    """Return the patches to write; none if all marks are fresh.

    `there` has the Nodes with our mark, by name. `absent` has names without a Node in Kubernetes.
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
    """Return the time since the last heartbeat; a long time if there was none."""
    last = moment(text(node, "metadata", "annotations", HEARTBEAT))
    return now - last if last is not None else 2 * FORGOTTEN


def _metadata(label: str | None, ours: str | None, beat: str | None) -> dict[str, Any]:
    labels = {SCHEDULABLE: label, OURS: ours}
    return {"metadata": {"labels": labels, "annotations": {HEARTBEAT: beat}}}
