"""Marks the Kubernetes Nodes whose names are those of virtbus nodes (`core/nodes.py`)."""

import asyncio
import logging

from virtbus.bus.ports import Bus, BusError
from virtbus.kubebridge.core.node.labels import OURS, marks
from virtbus.kubebridge.core.objects.plain import text
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import NODE
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeView
from virtbus.schemas.paging import PageAsk
from virtbus.schemas.subjects import api
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

LOOK_S = 10.0
ABSENT_S = 300.0
"""A missing Node is tried again after this long."""
TIMEOUT_S = 10.0


class NodeMarks:
    """Compares the nodes of both sides every LOOK_S. Without changes it needs one list."""

    def __init__(self, bus: Bus, cluster: Cluster, acts: asyncio.Event) -> None:
        self._bus = bus
        self._cluster = cluster
        self._acts = acts
        self._absent: dict[str, float] = {}
        """Names without a Node, with the loop time in seconds of the last try."""

    async def run(self) -> None:
        """Run until cancelled. It writes while `acts` is set."""
        while True:
            await self._acts.wait()
            try:
                await self.look()
            except (Answer, BusError, VirtbusError) as error:
                told = {"code": "node_marks_failed"}
                log.warning("Nodes are not marked: %s; retrying", error, extra=told)
            await asyncio.sleep(LOOK_S)

    async def _views(self) -> tuple[NodeView, ...]:
        """Return the nodes of the bus, from all pages."""
        found: list[NodeView] = []
        ask = PageAsk()
        while True:
            answer = await self._bus.request(api("node", "list"), ask, timeout_s=TIMEOUT_S)
            page = validate(NodePage, answer)
            found += page.items
            if page.continue_ is None or not page.items:
                return tuple(found)
            ask = PageAsk.model_validate({"continue": page.continue_})

    async def look(self) -> None:
        """Run one round."""
        views = await self._views()
        listed = await self._cluster.list(NODE, selector=OURS)
        there = {text(one, "metadata", "name"): one for one in listed.items}
        now = self._bus.sources.now()
        now_s = asyncio.get_running_loop().time()
        self._absent = {
            name: since
            for name, since in self._absent.items()
            if now_s < since + ABSENT_S and any(view.node == name for view in views)
        }
        refused: Answer | None = None
        for mark in marks(views, there, self._absent, now):
            try:
                await self._cluster.patch(NODE, mark.node, mark.patch)
            except Answer as answer_:
                if answer_.code == 404:
                    self._absent[mark.node] = now_s
                elif answer_.passing:
                    raise
                else:  # a refusal for one Node must not stop the others
                    refused = answer_
        if refused is not None:
            raise refused
