"""Nodes of a real cluster are marked while virtbus has a node of their name."""

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from tests.kubernetes.cluster import Cluster

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.node.labels import HEARTBEAT, OURS, SCHEDULABLE, controller, slim
from virtbus.kubebridge.core.objects.unstructured import stamp
from virtbus.kubebridge.core.runtime.controller import BUS_NODE, NODE
from virtbus.kubebridge.edge import cluster as door
from virtbus.kubebridge.edge.bus_nodes import BusNodes
from virtbus.kubebridge.edge.cluster import Scope
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.schemas.api import NodePage
from virtbus.schemas.node import NodeState, NodeView
from virtbus.schemas.subjects import api

pytestmark = pytest.mark.kubernetes
MINUTE_NS = 60 * 10**9


def node(name: str) -> NodeView:
    return NodeView(
        node=name, hostname=name, instance="i", state=NodeState.READY, cpus=4, memory_bytes=1
    )


async def test_nodes_of_the_same_name_are_marked_and_a_renamed_one_leaves_nothing(
    cluster: Cluster,
) -> None:
    names = ("marks-a", "marks-b")
    for name in names:
        made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(made))
    listed = [node("marks-a"), node("marks-gone")]
    now_ns = [time.time_ns()]  # another bridge of this cluster ignores Nodes with a fresh heartbeat

    async def answer(_: Request) -> NodePage:
        return NodePage(items=tuple(listed))

    def marked(name: str) -> dict[str, Any]:
        meta = cluster.get("node", name)["metadata"]
        found = {**meta.get("labels", {}), **meta.get("annotations", {})}
        return {key: found[key] for key in (SCHEDULABLE, OURS, HEARTBEAT) if key in found}

    bus = MemoryBus(MemoryServer(), sources=Sources(time_ns=lambda: now_ns[0]))
    endpoint = Endpoint("list", api("node", "list"), answer)
    info = ServiceInfo("controller", "1.0.0")
    leads, anything = asyncio.Event(), cast("Any", None)
    leads.set()
    async with (
        asyncio.timeout(60),
        bus.serve(info, [endpoint]),
        door.connect(cluster.kubeconfig) as client,
        background() as tasks,
    ):
        reconciler, nodes = (
            Reconciler(client, bus, anything, anything, leads),
            BusNodes(bus, leads, 0.05),
        )
        reconciler.store(NODE, Scope(selector=OURS, metadata_only=True), slim)
        reconciler.source(BUS_NODE, nodes)
        reconciler.add(controller(nodes))
        tasks.start(nodes.run())
        tasks.start(reconciler.run())
        beat = stamp(datetime.fromtimestamp(now_ns[0] / 1e9, UTC))
        while marked("marks-a") != {SCHEDULABLE: "true", OURS: "true", HEARTBEAT: beat}:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        assert client.written == 2  # the existing one, and an attempt for the missing one
        assert marked("marks-b") == {}
        listed[:] = [node("marks-b")]
        now_ns[0] += 6 * MINUTE_NS
        while marked("marks-a") or marked("marks-b").get(SCHEDULABLE) != "true":
            await asyncio.sleep(0.1)
    await bus.aclose()
    cluster.kubectl("delete", "node", *names)
