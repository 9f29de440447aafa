"""Kubernetes Nodes have KubeVirt's label and heartbeat while virtbus has a node of their name."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from virtbus.bus.memory import MemoryBus, MemoryServer
from virtbus.bus.ports import Endpoint, Request, ServiceInfo
from virtbus.kubebridge.core.node.labels import HEARTBEAT, OURS, SCHEDULABLE, Mark, marks
from virtbus.kubebridge.edge.cluster import Answer, Cluster, Listing
from virtbus.kubebridge.edge.node_marks import NodeMarks
from virtbus.schemas.api import NodePage
from virtbus.schemas.node import NodeState, NodeView, NodeWish
from virtbus.schemas.subjects import api

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def node(name: str = "n1", state: NodeState = NodeState.READY, **wish: Any) -> NodeView:
    return NodeView(
        node=name, hostname=name, instance="i", state=state, cpus=4, memory_bytes=1,
        wish=NodeWish(node=name, **wish) if wish else None,
    )  # fmt: skip


def after(there: dict[str, Any], written: list[Mark]) -> dict[str, Any]:
    """Return the Nodes with the mark after the patches."""
    found = copy.deepcopy(there)
    for name, patch in written:
        meta = found.setdefault(name, {"metadata": {"labels": {}, "annotations": {}}})["metadata"]
        for part, values in patch["metadata"].items():
            meta[part] = {k: v for k, v in (meta[part] | values).items() if v is not None}
        if OURS not in meta["labels"]:
            del found[name]
    return found


def label(there: dict[str, Any], name: str = "n1") -> str:
    return str(there[name]["metadata"]["labels"][SCHEDULABLE])


def test_a_node_is_marked_once_and_has_a_heartbeat_each_minute() -> None:
    there = after({}, marks([node()], {}, (), NOW))
    assert label(there) == "true"
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:00Z"
    writes = 0
    for seconds in range(0, 600, 10):
        written = marks([node()], there, (), NOW + timedelta(seconds=seconds))
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
    there = after({}, marks([node()], {}, (), NOW))
    (one,) = written = marks([view], there, (), NOW + timedelta(seconds=10))
    there = after(there, written)
    assert label(there) == "false"
    assert marks([view], there, (), NOW + timedelta(seconds=20)) == []
    assert one.node == "n1"


def test_a_silent_node_has_no_heartbeat() -> None:
    there = after({}, marks([node()], {}, (), NOW))
    silent = [node(state=NodeState.DOWN)]
    there = after(there, marks(silent, there, (), NOW + timedelta(minutes=2)))
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:00Z"
    assert marks(silent, there, (), NOW + timedelta(hours=2)) == []


def test_the_mark_of_a_forgotten_node_is_removed_after_a_while() -> None:
    there = after({}, marks([node("old")], {}, (), NOW))
    renamed = [node("new")]
    there = after(there, marks(renamed, there, (), NOW + timedelta(minutes=1)))
    assert set(there) == {"old", "new"}
    there = after(there, marks(renamed, there, (), NOW + timedelta(minutes=6)))
    assert set(there) == {"new"}


def test_a_node_without_a_kubernetes_node_is_skipped() -> None:
    assert marks([node()], {}, {"n1"}, NOW) == []


def test_a_removed_mark_is_restored() -> None:
    there = after({}, marks([node()], {}, (), NOW))
    del there["n1"]["metadata"]["annotations"][HEARTBEAT]
    there = after(there, marks([node()], there, (), NOW + timedelta(seconds=10)))
    assert there["n1"]["metadata"]["annotations"][HEARTBEAT] == "2026-11-22T12:00:10Z"


async def test_a_refused_mark_does_not_stop_the_others() -> None:
    written: list[str] = []

    class Refusing:
        async def list(self, *_: Any, **__: Any) -> Listing:
            return Listing([], "1")

        async def patch(self, _: Any, name: str, __: Any) -> None:
            if name == "b":
                raise Answer({"code": 403, "message": "a webhook says no"})
            written.append(name)

    async def listed(_: Request) -> NodePage:
        return NodePage(items=tuple(node(name) for name in "abc"))

    bus, cluster = MemoryBus(MemoryServer()), cast("Cluster", Refusing())
    endpoint = Endpoint("list", api("node", "list"), listed)
    async with bus.serve(ServiceInfo("controller", "1.0.0"), [endpoint]):
        with pytest.raises(Answer, match="a webhook says no"):
            await NodeMarks(bus, cluster, asyncio.Event()).look()
    assert written == ["a", "c"]
    await bus.aclose()
