"""Cache of the nodes of the bus. Only the leader lists them, periodically."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.kubebridge.core.node.labels import SILENT, takes
from virtbus.kubebridge.core.runtime.controller import Notify
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeView
from virtbus.schemas.paging import PageAsk
from virtbus.schemas.subjects import api
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

LOOK_S = 10.0
TIMEOUT_S = 10.0


class BusNodes:
    """The nodes by name.

    The bridge marks a Kubernetes Node with KubeVirt's label and heartbeat annotation. `notify` gets
    `/name` if the mark on the Node of this name may have to change.
    """

    def __init__(self, bus: Bus, leads: asyncio.Event, interval_s: float = LOOK_S) -> None:
        self._bus = bus
        self._leads = leads
        self._interval_s = interval_s
        self._views: dict[str, NodeView] = {}
        self.current = False
        """True if this bridge leads and its last list succeeded."""
        self.notify: Notify = lambda _: None

    def get(self, name: str) -> NodeView | None:
        return self._views.get(name)

    def paths(self) -> Iterable[str]:
        return [f"/{name}" for name in self._views]

    async def run(self) -> None:
        while True:
            if not self._leads.is_set():
                self.current = False
                await self._leads.wait()
            try:
                views = {view.node: view async for view in self._listed()}
            except (BusError, VirtbusError) as error:
                self.current = False
                log.warning("nodes: %s; retrying", error, extra={"code": "node_list_failed"})
            else:
                self.current = True
                before, self._views = self._views, views
                for name in sorted(before.keys() | views.keys()):
                    if _shown(before.get(name)) != _shown(views.get(name)):
                        self.notify(f"/{name}")
            await asyncio.sleep(self._interval_s)

    async def _listed(self) -> AsyncIterator[NodeView]:
        ask = PageAsk()
        while True:
            answer = await self._bus.request(api("node", "list"), ask, timeout_s=TIMEOUT_S)
            page = validate(NodePage, answer)
            for view in page.items:
                yield view
            if page.continue_ is None or not page.items:
                return
            ask = PageAsk.model_validate({"continue": page.continue_})


def _shown(view: NodeView | None) -> tuple[bool, bool] | None:
    """Return the facts that decide the mark: the node takes VMs, and it is silent or has left."""
    return None if view is None else (takes(view), view.state in SILENT)
