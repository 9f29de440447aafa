"""Runs the nodeagent: handles records and libvirt's events, and sends heartbeats."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.ports import Endpoint, Handler, WatchMark
from virtbus.bus.client.subscriptions import hear
from virtbus.bus.runtime.process import notify
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.assignments import Assignments
from virtbus.nodeagent.audit import Auditor
from virtbus.nodeagent.commands import Commands
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.core.uid_table import ABSENT
from virtbus.nodeagent.disk_stream import DiskStreams
from virtbus.nodeagent.domain_events import DomainEvents
from virtbus.nodeagent.export_stream import ExportStreams
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.node_spec import OTHER_BUS
from virtbus.nodeagent.quarantine import QuarantineDesk
from virtbus.nodeagent.rebuild import Rebuild
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.schemas.node_rpc import ImageReady, NetReady

log = logging.getLogger(__name__)


def _part(subject: str) -> type[ImageReady] | type[NetReady]:
    return ImageReady if subject.endswith(".image") else NetReady


class NodeAgent:
    """The nodeagent service of one node."""

    def __init__(
        self,
        tools: AgentPorts,
        liveness: Heartbeat,
        rpc: AgentRpc,
        up: Callable[[], None] = lambda: notify("READY=1"),
    ) -> None:
        self._tools = tools
        self._up = up
        self._liveness = liveness
        self._rpc = rpc
        self.vms = Assignments(tools, liveness.host)
        self.servers = tools.servers
        self._auditor = Auditor(tools, self.vms)

    async def run(self) -> None:
        """Serve until cancelled."""
        vms, tools, node = self.vms, self._tools, self._tools.settings.node
        watched = DomainEvents(
            tools.hypervisor, vms.actors, self._liveness.blind, tools.servers, tools.shares
        )
        async with asyncio.TaskGroup() as group:
            vms.group = group
            group.create_task(self._liveness.run())
            group.create_task(vms.left.run())
            group.create_task(vms.operations.run())
            group.create_task(vms.layers.run())
            async with (
                tools.bus.subscribe(subjects.ready_all(node)) as ready,
                tools.hypervisor.events() as events,
                tools.bus.node_watch(node, "agent", tools.gate) as watch,
                self._rpc.serve(vms.actors, self._more_endpoints(), lambda: not vms.listed),
            ):
                vms.relist = watch.relist
                group.create_task(hear(ready, _part, vms.ready))
                vms.on_disk |= await tools.files.list()
                vms.domains |= {d.uid: d for d in await self._domains_when_up()}
                group.create_task(watched.hear(events))
                group.create_task(self._resync(watch.relist))
                group.create_task(watched.look(tools.settings.compare_s))
                group.create_task(watched.stay_healthy())
                group.create_task(self._auditor.sweep())
                async for item in watch:
                    first = not vms.listed
                    vms.take(item)
                    if item is WatchMark.SYNCED:
                        self._report()
                        if first:
                            self._up()

    def _more_endpoints(self) -> list[Endpoint]:
        """Return the endpoints that `AgentRpc` serves for other classes."""
        tools, vms = self._tools, self.vms
        rebuild = Rebuild(tools, vms)
        commands = Commands(tools, vms.actors, self._rpc.check_here)
        handlers: dict[str, Handler] = {
            "command": commands.do,
            "freeze": commands.freeze,
            "records": rebuild.records,
            "join": rebuild.join,
            "audit": self._auditor.answer,
            "quarantine": QuarantineDesk(tools, self._auditor, vms).answer,
        }
        node, state_dir = tools.settings.node, tools.settings.state_dir
        exports = ExportStreams(tools.bus, node, state_dir, vms.operations)
        return [
            exports.endpoint(),
            DiskStreams(tools, vms.operations).endpoint(),
            *(
                Endpoint(f"agent-{verb}", subjects.rpc(node, "agent", verb), handler)
                for verb, handler in handlers.items()
            ),
        ]

    async def _domains_when_up(self) -> list[DomainFacts]:
        """Return libvirt's domains; wait until libvirt answers."""
        while True:
            try:
                return await self._tools.hypervisor.list_domains()
            except VirtbusError as error:
                log.warning("waiting for libvirt: %s", error, extra={"code": error.reason})
                self._liveness.report(NodeState.RECOVERING, str(error))
                await asyncio.sleep(1.0)

    async def _resync(self, relist: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._tools.settings.resync_s)
            relist()
            for actor in self.vms.actors.values():
                actor.status_writer.verify()

    def _report(self) -> None:
        """Report the node's readiness and its number of held VMs in the heartbeat."""
        vms, liveness = self.vms, self._liveness
        count, liveness.held = len(vms.actors), vms.listings.count(ABSENT)
        if vms.join.trusted:
            held = sum(bool(actor.vm.reasons.held) for actor in vms.actors.values())
            if liveness.state is NodeState.RECOVERING:
                log.info("ready: %d VM(s)", count, extra={"code": "ready"})
            message = f"{held} VM(s) here have no record on the bus" if held else ""
            liveness.report(NodeState.READY, message)
        else:
            message = f"{count} VM(s) held: {OTHER_BUS}" if count else OTHER_BUS
            liveness.report(NodeState.RECOVERING, message)
