"""The nodeagent's loop: wires its parts, handles records and host events, sends heartbeats."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.hearing import hear
from virtbus.bus.ports import Endpoint
from virtbus.bus.process import notify
from virtbus.nodeagent.assignments import OTHER_BUS, Assignments
from virtbus.nodeagent.audit import Auditor
from virtbus.nodeagent.commands import Commands
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.left_statuses import LeftStatuses
from virtbus.nodeagent.liveness import Liveness
from virtbus.nodeagent.quarantine import QuarantineDesk
from virtbus.nodeagent.rebuilding import Rebuilding
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.tools import Tools
from virtbus.nodeagent.watched_domains import WatchedDomains
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.schemas.nodework import ImageReady, NetReady

log = logging.getLogger(__name__)


def _part(subject: str) -> type[ImageReady] | type[NetReady]:
    return ImageReady if subject.endswith(".image") else NetReady


class NodeAgent:
    """The VMs of one node."""

    def __init__(
        self,
        tools: Tools,
        liveness: Liveness,
        rpc: AgentRpc,
        up: Callable[[], None] = lambda: notify("READY=1"),
        auditor: Auditor | None = None,
    ) -> None:
        self._tools = tools
        self._auditor = auditor
        self._up = up
        self._bus = tools.bus
        self._node = tools.settings.node
        self._liveness = liveness
        self._rpc = rpc
        self._left = LeftStatuses(self._bus, self._node)
        self._assignments = Assignments(
            tools,
            liveness.host,
            sweep_soon=self._sweep_soon,
            purge_status=self._left.purged,
            synced=self._tell,
        )
        self._guests = self._assignments.actors
        self._watched = WatchedDomains(tools.hypervisor, self._guests, liveness.blind)
        self._told_ready = False

    async def run(self) -> None:
        """Serve until cancelled."""
        vms = self._assignments
        async with asyncio.TaskGroup() as group:
            vms.group = group
            group.create_task(self._liveness.run())
            group.create_task(self._left.run())
            async with (
                self._bus.subscribe(subjects.ready_all(self._node)) as ready,
                self._tools.hypervisor.events() as events,
                self._bus.node_watch(self._node, "agent", self._tools.gate) as watch,
                self._rpc.serve(
                    self._guests,
                    self._more_endpoints(watch.relist),
                    lambda: not self._told_ready,
                ),
            ):
                vms.relist = watch.relist
                group.create_task(hear(ready, _part, vms.ready))
                vms.on_disk |= await self._tools.files.list()
                vms.domains |= {d.uid: d for d in await self._domains_when_up()}
                group.create_task(self._watched.hear(events))
                group.create_task(self._resync(watch.relist))
                group.create_task(self._watched.look(self._tools.settings.compare_s))
                group.create_task(self._watched.stay_healthy())
                if self._auditor is not None:
                    settings = self._tools.settings
                    group.create_task(
                        self._auditor.sweep(settings.resync_s, settings.orphan_grace_s)
                    )
                async for item in watch:
                    vms.take(item)

    def _more_endpoints(self, relist: Callable[[], None]) -> list[Endpoint]:
        """Return the endpoints that concern all VMs of the agent."""
        vms = self._assignments
        rebuilding = Rebuilding(
            self._node,
            self._tools.files,
            self._guests,
            lambda: vms.nonce if self._told_ready else None,
            relist,
        )
        commands = Commands(self._tools, self._guests, self._rpc.known).endpoint()
        more = [commands, *rebuilding.endpoints()]
        if self._auditor is not None:
            self._auditor.over(
                self._guests,
                lambda: vms.trusted,
                vms.purged,
                lambda uid: vms.listing(uid) == "unreadable",
            )
            quarantine = QuarantineDesk(
                self._tools,
                self._auditor,
                self._guests,
                lambda uid: vms.trusted and vms.absent(uid),
                vms.restore,
            )
            more += [self._auditor.endpoint(), quarantine.endpoint()]
        return more

    async def _domains_when_up(self) -> list[DomainFacts]:
        """Return libvirt's domains; wait for libvirt, without which nothing is known."""
        while True:
            try:
                return await self._tools.hypervisor.list_domains()
            except VirtbusError as error:
                log.warning("waiting for libvirt: %s", error, extra={"code": error.reason})
                self._liveness.say(str(error))
                await asyncio.sleep(1.0)

    async def _resync(self, relist: Callable[[], None]) -> None:
        """Compare bus and host completely, periodically."""
        while True:
            await asyncio.sleep(self._tools.settings.resync_s)
            relist()

    def _sweep_soon(self) -> None:
        if self._auditor is not None:
            self._auditor.sweep_soon()

    def _tell(self) -> None:
        """Report the result of the comparison, and readiness to the supervisor."""
        vms = self._assignments
        count, self._liveness.held = len(self._guests), vms.absences()
        if vms.trusted and vms.any_purged():
            self._sweep_soon()
        if vms.trusted:
            absent = sum(bool(guest.vm.reasons.held) for guest in self._guests.values())
            if self._liveness.state is NodeState.RECOVERING:
                log.info("ready: %d VM(s)", count, extra={"code": "ready"})
            self._liveness.ready(f"{absent} VM(s) here have no record on the bus" if absent else "")
        else:
            self._liveness.recovering(f"{count} VM(s) held: {OTHER_BUS}" if count else OTHER_BUS)
        if not self._told_ready:
            self._told_ready = True
            self._up()
