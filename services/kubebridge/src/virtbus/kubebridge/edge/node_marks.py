"""Marks Kubernetes' Nodes of the names that virtbus' nodes have (`core/nodes.py`)."""

import asyncio
import logging

from virtbus.bus.ports import Bus, BusError
from virtbus.kubebridge.core.nodes import OURS, marks
from virtbus.kubebridge.core.plain import text
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
"""A name that Kubernetes had no Node of is tried again after this long."""
TIMEOUT_S = 10.0


class NodeMarks:
    """Looks at both sides each LOOK_S; a list and few writes where nothing happens."""

    def __init__(self, bus: Bus, cluster: Cluster, acts: asyncio.Event) -> None:
        self._bus = bus
        self._cluster = cluster
        self._acts = acts
        self._absent: dict[str, float] = {}
        """The names of no Node, and when (loop time, seconds) that was seen."""

    async def run(self) -> None:
        """Until cancelled; it writes while `acts` is set."""
        while True:
            await self._acts.wait()
            try:
                await self.look()
            except (Answer, BusError, VirtbusError) as error:
                told = {"code": "node_marks_failed"}
                log.warning("Nodes are not marked: %s; again soon", error, extra=told)
            await asyncio.sleep(LOOK_S)

    async def _views(self) -> tuple[NodeView, ...]:
        """The nodes of the bus, from all pages."""
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
        """One round."""
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
                else:  # that of one Node keeps no other from its mark
                    refused = answer_
        if refused is not None:
            raise refused
