"""Marks the Kubernetes Nodes of virtbus nodes with KubeVirt's label and heartbeat annotation.

A Node and a virtbus node belong together if they have the same name. Tools find schedulable nodes
by the label; virtbus itself places VMs. The mark (label and annotation) is removed once the bus has
not listed the node for some time (`FORGOTTEN`).
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from virtbus.kubebridge.core.objects.unstructured import Object, part, path, read, stamp, text
from virtbus.kubebridge.core.runtime.controller import (
    BUS_NODE,
    NODE,
    Action,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Merge,
    Requeue,
)
from virtbus.schemas.node import NodeState, NodeView

SCHEDULABLE = "kubevirt.io/schedulable"
HEARTBEAT = "kubevirt.io/heartbeat"
OURS = "virtbus.io/node"
"""The label that the bridge sets on each Node that it marks."""
BEAT = timedelta(seconds=60)
FORGOTTEN = timedelta(minutes=5)
"""If the bus does not list the node, the mark is removed when its heartbeat annotation is this old.
The time is long because a bus that has just returned may list no nodes yet."""
ABSENT_S = 300.0
"""Seconds before the next attempt to mark a Node that does not exist."""
UNKNOWN_S = 10.0
"""Seconds before the next attempt while the bus does not answer."""
SILENT = frozenset({NodeState.SUSPECT, NodeState.DOWN, NodeState.LEFT})


def takes(view: NodeView) -> bool:
    """Return True if the node takes VMs now."""
    return view.state is NodeState.READY and not (
        view.node_spec is not None and view.node_spec.closed
    )


@dataclass(frozen=True, slots=True)
class Node:
    """A Kubernetes Node with the bridge's mark."""

    schedulable: str = path("metadata", "labels", SCHEDULABLE)
    heartbeat: datetime | None = path("metadata", "annotations", HEARTBEAT)


class Nodes(Protocol):
    """The nodes of the bus by name."""

    @property
    def current(self) -> bool:
        """Return True if the last request for the nodes succeeded."""

    def get(self, name: str) -> NodeView | None:
        """Return the node, or None."""


def reconcile(name: str, view: NodeView | None, node: Node | None, now: datetime) -> list[Action]:
    """Return the write that is due, or a Requeue until the next write; empty without a next write.

    `node` is None if the Node does not exist, or does not have the bridge's mark.
    """
    if view is None:
        if node is None:
            return []
        left = FORGOTTEN - _since(node, now)
        if left >= timedelta(0):
            return [Requeue(left.total_seconds() + 1)]
        return [_marked(name, None, None, None)]
    label = "true" if takes(view) else "false"
    if node is None:
        return [_marked(name, label, "true", stamp(now))]
    beats = view.state not in SILENT
    since = _since(node, now)
    if node.schedulable == label and (not beats or since < BEAT):
        return [Requeue((BEAT - since).total_seconds())] if beats else []
    return [_marked(name, label, "true", stamp(now if beats else now - since))]


def _since(node: Node, now: datetime) -> timedelta:
    return now - node.heartbeat if node.heartbeat is not None else 2 * FORGOTTEN


def _marked(name: str, label: str | None, ours: str | None, beat: str | None) -> Merge:
    labels = {SCHEDULABLE: label, OURS: ours}
    changes = {"metadata": {"labels": labels, "annotations": {HEARTBEAT: beat}}}
    return Merge(Key(NODE, "", name), changes, ABSENT_S)


def slim(node: Object) -> dict[str, Any]:
    """Return the parts of a Node that the controller reads."""
    meta = part(node, "metadata")
    kept = {name: meta.get(name) for name in ("name", "uid", "resourceVersion", "labels")}
    return {"metadata": kept | {"annotations": {HEARTBEAT: text(meta, "annotations", HEARTBEAT)}}}


def controller(nodes: Nodes) -> Controller:
    """Return the controller of Nodes. While the bus does not answer, it changes no Node."""

    def run(key: Key, inputs: Inputs) -> list[Action]:
        if not nodes.current:
            return [Requeue(UNKNOWN_S)]
        node = read(Node, inputs.obj) if inputs.obj is not None else None
        return reconcile(key.name, nodes.get(key.name), node, inputs.now)

    return Controller(NODE, run, (KeyMapping(NODE), KeyMapping(BUS_NODE)), workers=2)
