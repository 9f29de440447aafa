"""`virtbus.api.v1.node.*`: what is wanted of a node, changed by compare-and-set."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.ports import Bus, ConflictError, EntryKind, Request
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import unheard
from virtbus.controller.edge.commit import ATTEMPTS, MARKER_TTL_S
from virtbus.schemas import subjects
from virtbus.schemas.api import Empty, NodeDetail, NodePage, NodeRef, NodeVm
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeView, NodeWish
from virtbus.schemas.wire import encode, read, validate

log = logging.getLogger(__name__)

Change = Callable[[NodeWish], NodeWish]


class NodeApi:
    """The handlers of `node.*`; each takes a Request and returns the answer's model."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def list(self, request: Request) -> NodePage:
        validate(Empty, request.data)
        now_s = asyncio.get_running_loop().time()
        return NodePage(items=tuple(self._fleet.node_views(now_s)), alarms=self._fleet.alarms())

    async def get(self, request: Request) -> NodeDetail:
        return self._show(self._known(validate(NodeRef, request.data).node))

    async def cordon(self, request: Request) -> NodeDetail:
        node = self._known(validate(NodeRef, request.data).node)
        await self._change(node, lambda wish: wish.model_copy(update={"cordoned": True}))
        return self._show(node)

    async def uncordon(self, request: Request) -> NodeDetail:
        node = self._known(validate(NodeRef, request.data).node)
        open_again = {"cordoned": False, "draining": None}
        await self._change(node, lambda wish: wish.model_copy(update=open_again))
        return self._show(node)

    # --- shared ---------------------------------------------------------------------------
    async def _change(self, node: str, change: Change) -> NodeWish:
        """Change what is wanted of a node, whatever else changes it; an empty wish is purged."""
        key = subjects.node_wish(node)
        for _ in range(ATTEMPTS):
            entry = await self._bus.get(key)
            there = entry is not None and entry.kind is EntryKind.PUT
            before = read(NodeWish, entry.value) if entry and there else NodeWish(node=node)
            wish = change(before)
            if wish == before:
                return wish
            expect = entry.revision if entry else 0
            try:
                if wish == NodeWish(node=node):
                    revision = await self._bus.purge(key, expect=expect, marker_ttl_s=MARKER_TTL_S)
                else:
                    revision = await self._bus.put(key, encode(wish), expect=expect)
            except ConflictError:
                continue
            self._fleet.wish(wish, revision)
            log.info(
                "%s %s", node, wish.closed or "takes VMs", extra={"code": "node_wish", "node": node}
            )
            return wish
        message = f"what is wanted of {node} keeps changing; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)

    def _known(self, node: str) -> str:
        """The node, if it was heard, holds VMs, or something is wanted of it; else 404."""
        fleet = self._fleet
        holds = any(held.record.node == node for held in fleet.vms.values())
        if node in fleet.nodes or holds or fleet.wish_of(node) != NodeWish(node=node):
            return node
        message = f"there is no node {node}; `virtbus node list` shows what there is"
        raise VirtbusError(Code.NOT_FOUND, "node_not_found", message)

    def _show(self, node: str) -> NodeDetail:
        now_s = asyncio.get_running_loop().time()
        views = {view.node: view for view in self._fleet.node_views(now_s)}
        shown = [
            self._fleet.show_held(held, now_s)
            for held in sorted(self._fleet.vms.values(), key=lambda held: held.record.created_ns)
            if held.record.node == node
        ]
        vms = tuple(
            NodeVm(uid=vm.uid, namespace=vm.namespace, name=vm.name, state=vm.state) for vm in shown
        )
        return NodeDetail(
            node=views.get(node)
            or NodeView(**unheard(node).model_dump(), wish=self._fleet.wish_of(node)),
            vms=vms,
        )
