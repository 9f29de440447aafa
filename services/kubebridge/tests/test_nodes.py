"""Kubernetes Nodes have KubeVirt's label and heartbeat while virtbus has a node of their name."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.node.labels import (
    HEARTBEAT,
    OURS,
    SCHEDULABLE,
    Node,
    controller,
    reconcile,
)
from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.runtime.controller import NODE, Inputs, Key, Merge, Requeue
from virtbus.kubebridge.edge.bus_nodes import BusNodes
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeSpec, NodeState, NodeView
from virtbus.schemas.subjects import api

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def node(name: str = "n1", state: NodeState = NodeState.READY, **node_spec: Any) -> NodeView:
    return NodeView(
        node=name, hostname=name, instance="i", state=state, cpus=4, memory_bytes=1,
        node_spec=NodeSpec(node=name, **node_spec) if node_spec else None,
    )  # fmt: skip


def after(there: dict[str, Any], written: list[Merge]) -> dict[str, Any]:
    """Return the Nodes with the mark after the patches."""
    found = copy.deepcopy(there)
    for one in written:
        name, patch = one.key.name, one.changes
        meta = found.setdefault(name, {"metadata": {"labels": {}, "annotations": {}}})["metadata"]
        for part, values in patch["metadata"].items():
            meta[part] = {k: v for k, v in (meta[part] | values).items() if v is not None}
        if OURS not in meta["labels"]:
            del found[name]
    return found


def marks(views: list[NodeView], there: dict[str, Any], now: datetime) -> list[Merge]:
    """Return the writes to all Nodes. A Node without a write waits for its next heartbeat."""
    of_bus = {view.node: view for view in views}
    found = []
    for name in sorted(of_bus.keys() | there.keys()):
        seen = read(Node, there[name]) if name in there else None
        actions = reconcile(name, of_bus.get(name), seen, now)
        assert all(one.after_s > 0 for one in actions if isinstance(one, Requeue))
        found += [one for one in actions if isinstance(one, Merge)]
    return found


def label(there: dict[str, Any], name: str = "n1") -> str:
    return str(there[name]["metadata"]["labels"][SCHEDULABLE])


def test_a_node_is_marked_once_and_has_a_heartbeat_each_minute() -> None:
    there = after({}, marks([node()], {}, NOW))
    assert label(there) == "true"
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:00Z"
    writes = 0
    for seconds in range(0, 600, 10):
        written = marks([node()], there, NOW + timedelta(seconds=seconds))
        writes += len(written)
        there = after(there, written)
    assert writes == 9


@pytest.mark.parametrize(
    "view",
    [
        node(cordoned=True),
        node(state=NodeState.DRAINING),
        node(state=NodeState.DOWN),
        node(state=NodeState.RECOVERING),
    ],
)
def test_an_unschedulable_node_is_marked_once(view: NodeView) -> None:
    there = after({}, marks([node()], {}, NOW))
    (one,) = written = marks([view], there, NOW + timedelta(seconds=10))
    there = after(there, written)
    assert label(there) == "false"
    assert marks([view], there, NOW + timedelta(seconds=20)) == []
    assert one.key.name == "n1"


def test_a_silent_node_has_no_heartbeat() -> None:
    there = after({}, marks([node()], {}, NOW))
    silent = [node(state=NodeState.DOWN)]
    there = after(there, marks(silent, there, NOW + timedelta(minutes=2)))
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:00Z"
    assert marks(silent, there, NOW + timedelta(hours=2)) == []


def test_the_mark_of_a_forgotten_node_is_removed_after_a_while() -> None:
    there = after({}, marks([node("old")], {}, NOW))
    renamed = [node("new")]
    there = after(there, marks(renamed, there, NOW + timedelta(minutes=1)))
    assert set(there) == {"old", "new"}
    there = after(there, marks(renamed, there, NOW + timedelta(minutes=6)))
    assert set(there) == {"new"}


def test_a_node_without_a_kubernetes_node_is_tried_again_later() -> None:
    (one,) = reconcile("n1", node(), None, NOW)
    assert isinstance(one, Merge)
    assert one.absent_s == 300


def test_a_removed_mark_is_restored() -> None:
    there = after({}, marks([node()], {}, NOW))
    del there["n1"]["metadata"]["annotations"][HEARTBEAT]
    there = after(there, marks([node()], there, NOW + timedelta(seconds=10)))
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:10Z"


async def until_current(nodes: BusNodes, *, current: bool) -> None:
    while nodes.current is not current:
        await asyncio.sleep(0.01)


async def test_the_nodes_of_the_bus_are_listed_and_changes_reported() -> None:
    listed = [node("a"), node("b")]
    away: list[bool] = []

    async def answer(_: Request) -> NodePage:
        if away:
            raise VirtbusError(Code.INTERNAL, "away", "away")
        return NodePage(items=tuple(listed))

    bus, leads = MemoryBus(MemoryServer()), asyncio.Event()
    leads.set()
    nodes = BusNodes(bus, leads, interval_s=0.01)
    changed: asyncio.Queue[str] = asyncio.Queue()
    nodes.notify = changed.put_nowait
    endpoint = Endpoint("list", api("node", "list"), answer)
    async with (
        asyncio.timeout(30),
        bus.serve(ServiceInfo("controller", "1.0.0"), [endpoint]),
        background() as tasks,
    ):
        tasks.start(nodes.run())
        assert [await changed.get(), await changed.get()] == ["/a", "/b"]
        listed[1] = node("b", cordoned=True)
        assert await changed.get() == "/b"
        away.append(True)
        await until_current(nodes, current=False)
        inputs = Inputs(None, NOW, 0.0, {})
        (one,) = controller(nodes).reconcile(Key(NODE, "", "a"), inputs)
        assert isinstance(one, Requeue), "without the bus there is no heartbeat"
        away.clear()
        await until_current(nodes, current=True)
        leads.clear()
        await until_current(nodes, current=False)
    await bus.aclose()
