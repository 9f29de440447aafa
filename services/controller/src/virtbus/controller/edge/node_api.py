"""Handles `virtbus.api.v1.node.*`: shows nodes, and changes their specs by compare-and-set."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, Entry, EntryKind, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import pages
from virtbus.controller.core.evacuation import EvacuationTargets, eviction_blocked_reason
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import remembered
from virtbus.controller.core.node_views import node_views
from virtbus.controller.core.nodes import DOWN_AFTER_S, NodeSeen, node_not_found, unheard
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.unrecorded_vms import is_held
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.key_states import unreadable
from virtbus.controller.edge.volume_losses import VolumeLosses
from virtbus.schemas import subjects
from virtbus.schemas.api import (
    NodeDetail,
    NodeDrain,
    NodeFence,
    NodeForget,
    NodeForgotten,
    NodePage,
    NodeRef,
    NodeVm,
)
from virtbus.schemas.errors import Code, Detail, VirtbusError, quotable
from virtbus.schemas.events import EventKind
from virtbus.schemas.node import Drain, Fence, NodeSpec, NodeState, NodeView
from virtbus.schemas.paging import PageAsk
from virtbus.schemas.records import read_stored
from virtbus.schemas.wire import encode, validate

log = logging.getLogger(__name__)

VMS_SHOWN = 1000
"""Limit of VMs in an answer about a node."""
BLOCKED_REASON_CHARS = 200
Change = Callable[[NodeSpec], NodeSpec]


class NodeApi:
    """The handlers of `node.*`; each takes a Request and returns the answer's model."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._losses = VolumeLosses(bus, fleet)

    async def list(self, request: Request) -> pages.Plain:
        after = pages.key_of(validate(PageAsk, request.data).continue_)
        now_s = asyncio.get_running_loop().time()
        views = ((one.node, one) for one in node_views(self._fleet, now_s) if one.node > after)
        return pages.answer(NodePage, views, request, alarms=self._fleet.alarms())

    async def get(self, request: Request) -> NodeDetail:
        return self._show(self._known(validate(NodeRef, request.data).node))

    async def cordon(self, request: Request) -> NodeDetail:
        return await self._update(request, {"cordoned": True})

    async def uncordon(self, request: Request) -> NodeDetail:
        return await self._update(request, {"cordoned": False, "draining": None})

    async def _update(self, request: Request, update: dict[str, object]) -> NodeDetail:
        node = self._known(validate(NodeRef, request.data).node)
        await self._change(node, lambda node_spec: node_spec.model_copy(update=update), request)
        return self._show(node)

    async def drain(self, request: Request) -> NodeDetail:
        want = validate(NodeDrain, request.data)
        node = self._known(want.node)
        now_ns = self._bus.sources.time_ns()

        def drained(node_spec: NodeSpec) -> NodeSpec:
            before = node_spec.draining or Drain(since_ns=now_ns)
            discard = want.discard_local_disks or before.discard_local_disks
            draining = before.model_copy(update={"discard_local_disks": discard})
            return node_spec.model_copy(update={"cordoned": True, "draining": draining})

        await self._change(node, drained, request)
        return self._show(node)

    async def fence(self, request: Request) -> NodeDetail:
        want = validate(NodeFence, request.data)
        node = self._known(want.node)
        now_s = asyncio.get_running_loop().time()
        if not self._fleet.may_be_off(node, now_s):
            raise not_off(node, self._fleet.silence_s(node, now_s))
        proof = self.proof(self._fleet.nodes.get(node), "operator", want.confirm)
        proof = proof.model_copy(update={"discard_local_disks": want.discard_local_disks})
        await self.prove(node, proof, request=request)
        return self._show(node)

    def proof(self, seen: NodeSeen | None, by: str, why: str) -> Fence:
        """Return the proof that a node is off, with the agent instance that was heard last."""
        return Fence(
            instance=seen.record.instance if seen else "",
            started_ns=seen.record.started_ns if seen else 0,
            by=by,
            why=why,
            time_ns=self._bus.sources.time_ns(),
        )

    async def prove(
        self, node: str, proof: Fence, lease_revision: int = 0, request: Request | None = None
    ) -> None:
        """Write a fence, for a request or under the lease of a leader task.

        Raises:
            VirtbusError: 409 `lease_lost`: a later holder of the lease has written the spec (I15).
        """

        def proved(node_spec: NodeSpec) -> NodeSpec:
            if 0 < lease_revision < node_spec.lease_revision:
                message = f"the desired state of {node} was written under a later lease"
                raise VirtbusError(Code.CONFLICT, "lease_lost", message)
            update = {"lease_revision": lease_revision or node_spec.lease_revision}
            return fenced(node_spec, proof).model_copy(update=update)

        unread = NodeSpec(node=node)  # a fence may replace an unreadable spec
        if await self._change(node, proved, request, unread) is None:
            return
        identity = f"{proof.instance}:{proof.started_ns}"
        self._events.node(EventKind.NODE_FENCED, node, f"{proof.by}: {proof.why}", identity)

    async def unfence(self, request: Request) -> NodeDetail:
        node = self._known(validate(NodeRef, request.data).node)

        def back(node_spec: NodeSpec) -> NodeSpec:
            if node_spec.fenced is not None:
                self._check_back(node, node_spec.fenced)
            return node_spec.model_copy(update={"fenced": None, "lease_revision": 0})

        unread = NodeSpec(
            node=node, fenced=self.proof(None, "nobody", "its desired state is unreadable")
        )
        before = await self._change(node, back, request, unread)
        if before is not None and before.fenced is not None:
            seen = self._fleet.nodes.get(node)  # its heartbeat may have expired meanwhile
            same = seen is not None and seen.record.instance == before.fenced.instance
            message = "back, and as the same agent: it was never off" if same else "back"
            level = logging.WARNING if same else logging.INFO
            log.log(level, "%s is %s", node, message, extra={"code": "unfenced", "node": node})
            self._events.node(EventKind.NODE_UNFENCED, node, message, f"{before.fenced.time_ns}")
        return self._show(node)

    def _check_back(self, node: str, fence: Fence) -> None:
        """Raise 409 until the node answers, has read its records, and released old copies (F25).

        An old copy belongs to a VM that has another node by now, or was deleted. Purge markers make
        the node release old copies. The markers expire after a day, so that old copies are checked
        only for a day after the fence. A VM whose record the bus has lost is not an old copy.
        """
        now_s = asyncio.get_running_loop().time()
        seen = self._fleet.nodes.get(node)
        if seen is None or self._fleet.silent(node, now_s):
            message = f"{node} does not answer; start its services, then repeat"
            raise VirtbusError(Code.CONFLICT, "node_silent", message, after_ms=5000)
        if seen.record.state is not NodeState.READY:
            message = f"{node} still compares its host with its records; repeat in a moment"
            raise VirtbusError(Code.CONFLICT, "node_recovering", message, after_ms=2000)
        if self._bus.sources.time_ns() - fence.time_ns > MARKER_TTL_S * 1e9:
            return
        vms = self._fleet.vms
        old = [
            uid
            for (there, uid), (status, _) in self._fleet.statuses.items()
            if there == node
            and (not is_held(status) if uid not in vms else vms[uid].record.node != node)
        ]
        if old:
            message = (
                f"{node} still removes what is left there of {len(old)} VM(s) that run elsewhere "
                "by now; repeat in a moment"
            )
            details = tuple(
                Detail(path=f"vm/{uid}", message="not released yet") for uid in old[:20]
            )
            raise VirtbusError(Code.CONFLICT, "old_copies", message, after_ms=2000, details=details)

    async def forget(self, request: Request) -> NodeForgotten:
        """Remove the bus' data of a node that is gone for good; the request may be repeated.

        The join record is purged after all other data. Its purge marker makes each controller
        forget the node, and makes the joining task delete the node's consumers. The request's id is
        stored last: a repeat after that has no effect.
        """
        want = validate(NodeForget, request.data)
        node = want.node
        entry = await self._bus.get(subjects.node_spec(node))
        if request.id in self._wanted(node, entry, NodeSpec(node=node)).requests:
            return NodeForgotten(node=node, statuses=0)
        join = await self._bus.get(subjects.join_nonce(node))
        if join is None or join.kind is not EntryKind.PUT:
            self._known(node)
        now_s = asyncio.get_running_loop().time()
        if not self._fleet.may_be_off(node, now_s):
            message = (
                f"{node} was heard {self._fleet.silence_s(node, now_s):.0f} s ago; stop its "
                f"services, and repeat when it was silent for {DOWN_AFTER_S:.0f} s"
            )
            raise VirtbusError(Code.CONFLICT, "node_answers", message, after_ms=5000)
        self._check_empty(node)
        self._losses.check(want)
        lost = await self._losses.give_up(node)
        for key in (subjects.node_images(node), subjects.node_pools(node)):
            await self._bus.purge(key, marker_ttl_s=MARKER_TTL_S)
        uids = [uid for there, uid in self._fleet.statuses if there == node]
        of_node = (
            subjects.node_instance(node),
            subjects.node_rival(node),
            subjects.node_host(node),
        )
        for key in (*(subjects.vm_status(node, uid) for uid in uids), *of_node):
            await self._bus.purge(key, marker_ttl_s=MARKER_TTL_S)

        def nothing(node_spec: NodeSpec) -> NodeSpec:
            return NodeSpec(node=node, requests=node_spec.requests)

        await self._change(node, nothing, unread=NodeSpec(node=node))
        await self._bus.purge(subjects.node_hosts(node), marker_ttl_s=MARKER_TTL_S)
        await self._bus.purge(subjects.join_nonce(node), marker_ttl_s=MARKER_TTL_S)
        await self._change(node, nothing, request, NodeSpec(node=node))
        self._fleet.drop_node(node)
        log.info("%s is forgotten", node, extra={"code": "node_forgotten", "node": node})
        self._events.node(EventKind.NODE_FORGOTTEN, node, "", f"{join.revision if join else 0}")
        return NodeForgotten(node=node, statuses=len(uids), lost_volumes=lost)

    def _check_empty(self, node: str) -> None:
        there = [held.record for held in self._fleet.vms.values() if held.record.node == node]
        if there:
            message = (
                f"{len(there)} VM(s) are on {node}; `virtbus node fence {node} --confirm HOW "
                "--discard-local-disks` lets them start elsewhere; delete what stays, then repeat"
            )
            details = tuple(Detail(path=f"vm/{one.uid}", message=one.name) for one in there[:20])
            raise VirtbusError(Code.CONFLICT, "node_has_vms", message, details=details)

    # --- shared ---------------------------------------------------------------------------
    async def _change(
        self,
        node: str,
        change: Change,
        request: Request | None = None,
        unread: NodeSpec | None = None,
    ) -> NodeSpec | None:
        """Change a node's spec by CAS, with retries; return the previous spec.

        `unread` replaces an unreadable spec. Return None if the request has already acted (ADR
        0002). The request's id is stored even if the request changes nothing: a late repeat must
        not undo a change that was made meanwhile. A spec that asks for nothing expires; without
        request ids, it is purged at once.
        """
        key = subjects.node_spec(node)
        for _ in range(ATTEMPTS):
            entry = await self._bus.get(key)
            before = node_spec = self._wanted(node, entry, unread)
            expect = entry.revision if entry else 0
            if request is not None:
                if request.id in before.requests:
                    self._fleet.node_spec(before, expect)
                    return None
                refuse_late(request.deadline_s)
                requests = remembered(before.requests, request.id)
                node_spec = node_spec.model_copy(update={"requests": requests})
            node_spec = change(node_spec)
            if node_spec == before and not self._fleet.damaged.has(key):
                return before
            try:
                if node_spec == NodeSpec(node=node):
                    revision = await self._bus.purge(key, expect=expect, marker_ttl_s=MARKER_TTL_S)
                else:
                    ttl_s = MARKER_TTL_S if node_spec.idle else None
                    revision = await self._bus.put(
                        key, encode(node_spec), expect=expect, ttl_s=ttl_s
                    )
            except ConflictError:
                continue
            self._fleet.node_spec(node_spec, revision)
            log.info(
                "%s %s",
                node,
                node_spec.closed or "takes VMs",
                extra={"code": "node_spec", "node": node},
            )
            return before
        message = f"the desired state of {node} keeps changing; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)

    def _wanted(self, node: str, entry: Entry | None, unread: NodeSpec | None) -> NodeSpec:
        """Return the spec in `entry`; for an unreadable spec, the cached spec or `unread`.

        Raises UnreadableValueError if both are None: the unreadable spec may contain a fence.
        """
        if entry is None or entry.kind is not EntryKind.PUT:
            return NodeSpec(node=node)
        try:
            return read_stored(NodeSpec, entry.key, entry.value)
        except VirtbusError as error:
            known = self._fleet.node_specs.get(node)
            if known is not None:
                return known[0]
            if unread is None:
                raise UnreadableValueError(unreadable(entry, error)) from error
            return unread

    def _eviction_blocked(self, node: str, now_s: float) -> dict[str, str]:
        """Return by uid why a VM stays on its drained or fenced node; "" for a VM that leaves."""
        node_spec = self._fleet.node_spec_of(node)
        if node_spec.draining is None and node_spec.fenced is None:
            return {}
        discard = any(
            word is not None and word.discard_local_disks
            for word in (node_spec.draining, node_spec.fenced)
        )
        places = EvacuationTargets(self._fleet.candidates(now_s))
        silent = node_spec.fenced is None and self._fleet.silent(node, now_s)
        found = {}
        for uid, held in self._fleet.vms.items():
            record = held.record
            if record.node == node and not record.deleting:
                why = "" if record.evacuating else eviction_blocked_reason(record, discard=discard)
                if silent:
                    why = f"{node} does not answer; when it is off for sure: virtbus node fence"
                found[uid] = why or places.find(record, home=record.evacuating)[1]
        return found

    def _known(self, node: str) -> str:
        """Return the node; raise 404 if the fleet has neither the node nor a spec of it."""
        fleet = self._fleet
        if fleet.has_node(node) or not fleet.node_spec_of(node).idle:
            return node
        raise node_not_found(node)

    def _show(self, node: str) -> NodeDetail:
        now_s = asyncio.get_running_loop().time()
        views = {view.node: view for view in node_views(self._fleet, now_s)}
        shown = [
            self._fleet.show_held(held, now_s)
            for held in sorted(self._fleet.vms.values(), key=lambda held: held.record.created_ns)
            if held.record.node == node
        ]
        eviction_blocked_reason = self._eviction_blocked(node, now_s)
        vms = [
            NodeVm(
                uid=vm.uid,
                namespace=vm.namespace,
                name=vm.name,
                state=vm.state,
                evacuating=vm.uid in self._fleet.evacuating,
                eviction_blocked_reason=quotable(
                    eviction_blocked_reason.get(vm.uid, ""), BLOCKED_REASON_CHARS
                ),
            )
            for vm in shown
        ]
        vms.sort(
            key=lambda vm: bool(vm.eviction_blocked_reason)
        )  # VMs that can leave come first: a drain waits for them
        return NodeDetail(
            node=views.get(node)
            or NodeView(**unheard(node).model_dump(), node_spec=self._fleet.node_spec_of(node)),
            vms=tuple(vms[:VMS_SHOWN]),
            unlisted=max(0, len(vms) - VMS_SHOWN),
        )


def fenced(node_spec: NodeSpec, fence: Fence) -> NodeSpec:
    """Return the spec with the fence.

    An existing fence is kept. The new fence can only switch on its `discard_local_disks`.
    """
    if node_spec.fenced is not None:
        if not fence.discard_local_disks:
            return node_spec
        fence = node_spec.fenced.model_copy(update={"discard_local_disks": True})
    return node_spec.model_copy(update={"fenced": fence})


def not_off(node: str, silence_s: float) -> VirtbusError:
    """Return the error 409 for a node whose last heartbeat is too recent for a fence."""
    message = (
        f"{node} was heard {silence_s:.0f} s ago, and a node that is off is silent for "
        f"{DOWN_AFTER_S:.0f} s; to empty a node that runs: `virtbus node drain {node}`"
    )
    return VirtbusError(Code.CONFLICT, "node_answers", message, after_ms=5000)
