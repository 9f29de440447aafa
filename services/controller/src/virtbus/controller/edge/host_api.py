"""Writes a node's host record at its first heartbeat; later only requests of persons change it."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, EntryKind, Request
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.approval import approval
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.mutations import remembered
from virtbus.controller.edge.cas import ATTEMPTS
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.node_api import NodeApi, not_off
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeDetail
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.host_api import NodeApprove, NodeTakeover
from virtbus.schemas.hosts import HostRecord, Instance, Takeover
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.wire import encode, read, validate

log = logging.getLogger(__name__)

LOOK_S = 1.0

Change = Callable[[HostRecord], HostRecord]


class HostApi(NodeApi):
    """Adds the handlers that change a host record to those of NodeApi."""

    async def takeover(self, request: Request) -> NodeDetail:
        """Give a node to an agent that was refused and waits (ADR 0031).

        The takeover names the current revision of the node's instance key. If the previous agent
        renews that key, the revision differs, and the previous agent keeps the node.
        """
        want = validate(NodeTakeover, request.data)
        node, fleet = self._known(want.node), self._fleet
        rival = self._rival(node, want.instance)
        now_s = asyncio.get_running_loop().time()
        if not fleet.may_be_off(node, now_s):
            raise not_off(node, fleet.silence_s(node, now_s))
        key = await self._bus.get(subjects.node_instance(node))
        word = Takeover(
            instance=rival.instance,
            over=key.revision if key is not None else 0,
            why=want.confirm,
            time_ns=self._bus.sources.time_ns(),
        )
        given = {"host": rival.host, "takeover": word}
        if await self._record(node, lambda host: host.model_copy(update=given), request):
            message = f"given to {rival.hostname or rival.instance}: {want.confirm}"
            log.warning("%s is %s", node, message, extra={"code": "taken_over", "node": node})
            self._events.node(EventKind.NODE_TAKEN_OVER, node, message, rival.instance)
        return self._show(node)

    def _rival(self, node: str, instance: str | None) -> Instance:
        """Return the waiting agent; raise 409 if no agent or several agents wait."""
        waiting = self._fleet.hosts.waiting(node)
        meant = [one for one in waiting if instance in {None, one.instance}]
        if len(meant) == 1:
            return meant[0]
        details = tuple(
            Detail(path=f"instance/{one.instance}", message=f"{one.hostname}: {one.why}")
            for one in waiting
        )
        if not meant:
            message = f"no agent waits for {node}; start virtbus on its new host, then repeat"
            raise VirtbusError(Code.CONFLICT, "no_rival", message, details=details)
        message = f"{len(meant)} agents wait for {node}; say which, by its instance"
        raise VirtbusError(Code.CONFLICT, "many_rivals", message, details=details)

    async def approve(self, request: Request) -> NodeDetail:
        """Approve the values of a request. Omitted values are taken from the node's last report."""
        want = validate(NodeApprove, request.data)
        node = self._known(want.node)
        last = self._fleet.hosts.reported.get(node)
        if last is None:
            message = f"{node} was not heard by this controller; start it, then repeat"
            raise VirtbusError(Code.CONFLICT, "node_silent", message, after_ms=5000)
        fields = {name: getattr(want, name) for name in type(approval(last[0])).model_fields}
        given = {name: value for name, value in fields.items() if value is not None}
        approved = approval(last[0]).model_copy(update=given)
        change = {"approved": approved}
        if await self._record(node, lambda host: host.model_copy(update=change), request):
            message = f"{approved.cpus} CPUs, {approved.memory_bytes} bytes of memory"
            self._events.node(EventKind.NODE_APPROVED, node, message, request.id)
        return self._show(node)

    async def _record(self, node: str, change: Change, request: Request) -> bool:
        """Change the host record by CAS; return False if the request has already acted."""
        key = subjects.node_host(node)
        for _ in range(ATTEMPTS):
            entry = await self._bus.get(key)
            there = entry is not None and entry.kind is EntryKind.PUT
            host = HostRecord(node=node)
            if entry is not None and there:
                try:
                    host = read(HostRecord, entry.value)
                except VirtbusError as error:  # this request replaces the unreadable record
                    log.error("unreadable %s: %s", key, error, extra={"code": "bad_record"})
            if request.id in host.requests:
                return False
            refuse_late(request.deadline_s)
            host = change(host).model_copy(
                update={"requests": remembered(host.requests, request.id)}
            )
            try:
                revision = await self._bus.put(
                    key, encode(host), expect=entry.revision if entry else 0
                )
            except ConflictError:
                continue
            self._fleet.hosts.took(node, host, revision)
            self._fleet.offer(node)
            return True
        message = f"the host record of {node} keeps changing; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)


class HostDuty:
    """The leader task that records host and capacity of new nodes, and reports refused agents."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events

    async def run(self, tenure: LeaderTerm) -> None:
        reported: set[tuple[str, str]] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            hosts = self._fleet.hosts
            for node, (record, _) in list(hosts.reported.items()):
                if node in self._fleet.nodes:
                    tenure.check()
                    await self._first(record)
            rivals = {
                (node, one.instance): one for node in hosts.rivals for one in hosts.waiting(node)
            }
            for (node, instance), one in rivals.items():
                if (node, instance) not in reported:
                    message = f"a second agent on {one.hostname} is kept out: {one.why}"
                    log.error("%s: %s", node, message, extra={"code": "node_rival", "node": node})
                    self._events.node(EventKind.NODE_RIVAL, node, message, instance)
            reported = set(rivals)

    async def _first(self, record: NodeRecord) -> None:
        """Record host and capacity of a node, each only if the host record lacks the value."""
        hosts, node = self._fleet.hosts, record.node
        host = hosts.record(node) or HostRecord(node=node)
        update: dict[str, object] = {}
        if host.host is None and record.host is not None:
            update["host"] = record.host
        if host.approved is None and not host.trusted and record.cpus:
            update["approved"] = approval(record)
        if not update:
            return
        host = host.model_copy(update=update)
        try:
            revision = await self._bus.put(
                subjects.node_host(node), encode(host), expect=hosts.revision(node)
            )
        except BusError as error:
            log.info(
                "recording of %s will be retried: %s", node, error, extra={"code": "host_waits"}
            )
            return
        hosts.took(node, host, revision)
        self._fleet.offer(node)
        log.info("%s is recorded", node, extra={"code": "host_recorded", "node": node})
