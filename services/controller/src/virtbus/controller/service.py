"""Assembles a controller: the watches, the handlers of requests, and the leader tasks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from virtbus.bus.client.ports import Bus, Endpoint, Handler, Request, ServiceInfo
from virtbus.bus.client.signing import signing
from virtbus.bus.provisioning.node_join import Nodes
from virtbus.bus.runtime.process import notify
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.request_limits import (
    READS,
    READS_AT_ONCE,
    REQUESTS_AT_ONCE,
    WATCHES_BEGUN_AT_ONCE,
)
from virtbus.controller.edge import fencing
from virtbus.controller.edge.audits import Audits
from virtbus.controller.edge.backup_api import BackupApi
from virtbus.controller.edge.backup_schedule_api import BackupScheduleApi
from virtbus.controller.edge.backup_schedule_runs import BackupScheduleRuns
from virtbus.controller.edge.bus_storage import BusStorageGuard
from virtbus.controller.edge.client_spans import store_client_spans
from virtbus.controller.edge.evacuation import Evacuations
from virtbus.controller.edge.finalizer import Finalizer
from virtbus.controller.edge.fleet_api import FleetApi
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.group_api import GroupApi
from virtbus.controller.edge.group_keys import NodeGroups
from virtbus.controller.edge.hold_sweep import HoldSweep
from virtbus.controller.edge.host_addresses import FleetAddresses
from virtbus.controller.edge.host_api import HostApi, HostDuty
from virtbus.controller.edge.image_name_api import ImageNameApi
from virtbus.controller.edge.informers import Informers
from virtbus.controller.edge.leader_tasks import Duty, LeaderTasks
from virtbus.controller.edge.lease import LeaderTerm, Leases
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.moved_files import MovedFiles
from virtbus.controller.edge.names_api import NamesApi
from virtbus.controller.edge.network_api import NetworkApi, NetworkLimits
from virtbus.controller.edge.network_removals import NetworkRemovals
from virtbus.controller.edge.node_monitor import NodeMonitor
from virtbus.controller.edge.operation_api import OperationApi
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.operation_sweep import OperationSweep
from virtbus.controller.edge.overlay_peers import OverlayPeers
from virtbus.controller.edge.pending_scheduler import PendingScheduler
from virtbus.controller.edge.quarantine import Overtaken, Quarantines
from virtbus.controller.edge.rebuild import Rebuilds
from virtbus.controller.edge.snapshot_api import SnapshotApi
from virtbus.controller.edge.snapshot_sweep import SnapshotSweep
from virtbus.controller.edge.stream_trimmer import StreamTrimmer
from virtbus.controller.edge.suspensions import Suspensions
from virtbus.controller.edge.vm_api import VmApi
from virtbus.controller.edge.vm_commands import VmCommands
from virtbus.controller.edge.vm_creates import CreateRules
from virtbus.controller.edge.vm_power import VmPower
from virtbus.controller.edge.volume_api import VolumeApi
from virtbus.controller.edge.volume_attachments import VolumeAttachments
from virtbus.controller.edge.volume_fills import VolumeFills
from virtbus.controller.edge.volume_move_api import VolumeMoveApi
from virtbus.controller.edge.volume_moves import VolumeMoves
from virtbus.controller.edge.volume_removals import VolumeRemovals
from virtbus.controller.edge.volume_room import VolumeRoom
from virtbus.controller.edge.volume_templates import VolumeTemplates
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.controller.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import Overcommit
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import CLIENT_VALUES

log = logging.getLogger(__name__)


class ControllerService:
    """A controller.

    `declared` keeps the streams of the bus declared. `joined` joins new nodes; None means that this
    process joins none.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        declared: Callable[[], Coroutine[Any, Any, None]],
        joined: Callable[[Nodes], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        bus, self._keys = signing(bus)
        self._bus = bus
        self._declared = declared
        self._joined = joined
        self._settings = settings
        self._instance = bus.sources.uuid7()
        self._fleet = Fleet(settings.vcpus_per_cpu)
        events = FleetEvents(bus)
        self._watches = WatchServer(self._fleet, bus, self._instance)
        self._feeds = Informers(bus, self._fleet, self._watches)
        self._storage, self._living = BusStorageGuard(bus), LivingVolumes(bus, self._fleet)
        self._vms = VmApi(bus, self._fleet, self._watches, events, self._storage, self._rules)
        self._fills = VolumeFills(bus, self._fleet, events, self._room, self._vms)
        self._volumes = VolumeApi(bus, self._fleet, events, self._volume_room, self._fills)
        self._image_names = ImageNameApi(
            bus,
            self._fleet,
            events,
            self._storage,
            Quota(settings.image_names_per_namespace, settings.image_names_in_all),
        )
        self._schedules = self._schedule_api(events)
        self._operations, self._snapshots = self._snapshot_apis(events)
        self._networks, self._groups = self._network_apis(events)
        self._power = VmPower(self._vms, self._fleet)
        self._about = FleetApi(bus, self._fleet, self._storage)
        self._nodes = HostApi(bus, self._fleet, events)
        self._endings = Finalizer(bus, self._fleet, events)
        self._audits = Audits(bus, self._fleet)
        self._quarantines = Quarantines(bus, self._fleet, events, self._vms.addresses)
        self._rebuilds = Rebuilds(bus, self._fleet, events, self._keys)
        self._leases, self._suspensions = Leases(bus, self._instance), Suspensions(bus)
        self._pulse = NodeMonitor(bus, self._fleet, self._watches, events, self._leases)
        self._placing = PendingScheduler(bus, self._fleet, self._watches, events, self._living)
        self._moves, self._removals = self._volume_tasks(bus, events)
        self._duties = LeaderTasks(self._leases, self._duties_of(bus, events))

    def _volume_tasks(self, bus: Bus, events: FleetEvents) -> tuple[VolumeMoves, VolumeRemovals]:
        files = MovedFiles(bus, self._fleet)
        moves = VolumeMoves(bus, self._fleet, events, files)
        removals = VolumeRemovals(bus, self._fleet, events, files)
        wakes = (self._placing.wake, self._fills.wake, moves.wake, removals.wake)
        self._feeds.wakes.calls += wakes
        return moves, removals

    @property
    def _rules(self) -> CreateRules:
        settings = self._settings
        quota = Quota(settings.addresses_per_network, settings.addresses_in_all)

        async def planned(volume: VolumeRecord, account: str) -> VolumeRecord:
            return await self._volumes.planned(volume, account)

        strict, room = settings.overcommit is Overcommit.STRICT, self._volume_room
        templates = VolumeTemplates(
            self._bus, self._fleet, room, planned, self._living, strict=strict
        )
        return CreateRules(quota, templates, self._living, strict=strict)

    @property
    def _volume_room(self) -> VolumeRoom:
        return VolumeRoom(self._fleet, self._storage, self._settings.volume_quota)

    @property
    def _room(self) -> OperationRoom:
        return OperationRoom(self._fleet, self._storage, self._settings.operation_quota)

    def _snapshot_apis(self, events: FleetEvents) -> tuple[OperationApi, SnapshotApi]:
        settings, bus, fleet, vms = self._settings, self._bus, self._fleet, self._vms
        operations = OperationApi(bus, fleet, events, self._room, settings.operation_keep_s, vms)
        of_snapshots = Quota(settings.snapshots_per_namespace, settings.snapshots_in_all)
        return operations, SnapshotApi(bus, fleet, events, of_snapshots, vms, operations)

    def _network_apis(self, events: FleetEvents) -> tuple[NetworkApi, GroupApi]:
        settings, fleet, storage = self._settings, self._fleet, self._storage
        of_groups = Quota(settings.security_groups_per_namespace, settings.security_groups_in_all)
        groups = GroupApi(self._bus, fleet, events, storage, of_groups)
        of_networks = Quota(settings.networks_per_namespace, settings.networks_in_all)
        limits = NetworkLimits(of_networks, settings.client_subnets)
        return NetworkApi(self._bus, fleet, events, storage, limits), groups

    def _schedule_api(self, events: FleetEvents) -> BackupScheduleApi:
        quota = self._settings.backup_schedule_quota
        return BackupScheduleApi(self._bus, self._fleet, events, self._storage, quota, self._vms)

    def _duties_of(self, bus: Bus, events: FleetEvents) -> list[Duty]:
        settings, fleet = self._settings, self._fleet
        self._pulse.listeners.append(self._placing.wake)
        sweep = partial(
            self._endings.sweep_forever,
            interval_s=settings.sweep_interval_s,
            grace_s=settings.orphan_grace_s,
        )
        completing = SnapshotSweep(bus, fleet, events)
        self._feeds.wakes.calls.append(completing.wake)
        schedules = BackupScheduleRuns(bus, fleet, events, self._room)
        networks, groups = NetworkRemovals(bus, fleet, events), NodeGroups(bus, fleet)
        self._feeds.wakes.calls += [schedules.wake, networks.wake, groups.wake]
        shares = StreamTrimmer(bus, events, lambda: len(fleet.nodes))
        duties: list[Duty] = [
            sweep,
            Evacuations(bus, fleet, self._watches, events, self._living).run,
            self._placing.run,
            self._removals.run,
            completing.run,
            networks.run,
            groups.run,
            schedules.run,
            self._fills.run,
            self._moves.run,
            HoldSweep(bus, fleet, events).run,
            FleetAddresses(bus, fleet).run,
            OverlayPeers(bus, fleet).run,
            OperationSweep(bus, fleet, settings.operation_keep_s, settings.operation_quota).run,
            Overtaken(bus, fleet).run,
            HostDuty(bus, fleet, events).run,
        ]
        if settings.fence_command:
            turn_off = fencing.command(settings.fence_command, settings.fence_timeout_s)
            duties.append(fencing.FenceAgent(fleet, self._nodes, turn_off).run)
        return [*map(self._when_synced, duties), self._pulse.tell, shares.run]

    def _when_synced(self, duty: Duty) -> Duty:
        """Delay a leader task until this controller has read all records of the fleet."""

        async def run(tenure: LeaderTerm) -> None:
            await self._feeds.synced()
            await duty(tenure)

        return run

    async def run(self) -> None:
        info = ServiceInfo("virtbus-controller", VERSION, "API, admission, placement")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._suspensions.run())
            group.create_task(self._declared())
            group.create_task(self._keys.prepare())
            if self._joined is not None:
                group.create_task(self._joined(self._nodes_here))
            group.create_task(self._feeds.run())
            group.create_task(self._watches.run())
            group.create_task(self._endings.finish_released(self._feeds.released))
            group.create_task(self._beat())
            group.create_task(self._duties.run())
            group.create_task(self._storage.run())
            group.create_task(store_client_spans(self._bus))
            async with self._bus.serve(info, self._endpoints()):
                await self._feeds.synced()
                log.info("ready", extra={"code": "ready"})
                notify("READY=1")
                await asyncio.get_running_loop().create_future()

    def _nodes_here(self) -> set[str]:
        """Return the nodes whose heartbeats arrive, and those with a join record.

        A node without a heartbeat needs its consumers, too: netd and imaged may run without the
        agent, and a restart of a single server loses the consumers.
        """
        fleet, now_s = self._fleet, asyncio.get_running_loop().time()
        return {node for node in fleet.nodes if not fleet.silent(node, now_s)} | fleet.hosts.joined

    def _endpoints(self) -> list[Endpoint]:
        vms, nodes, about, operations = self._vms, self._nodes, self._about, self._operations
        power, volumes, groups = self._power, self._volumes, self._groups
        commands = VmCommands(self._bus, vms)
        attachments = VolumeAttachments(self._bus, self._fleet, vms, volumes)
        moves = VolumeMoveApi(self._bus, self._fleet, volumes, self._room, vms.off_moves)
        names, networks, snapshots = self._image_names, self._networks, self._snapshots
        backups, schedules = BackupApi(self._bus, self._fleet, vms, operations), self._schedules
        handlers: dict[tuple[str, str], Handler] = {
            ("vm", "create"): vms.create,
            ("vm", "get"): vms.get,
            ("vm", "list"): vms.list,
            ("vm", "update"): vms.update,
            ("vm", "delete"): vms.delete,
            ("vm", "start"): power.start,
            ("vm", "stop"): power.stop,
            ("vm", "restart"): power.restart,
            ("vm", "pause"): power.pause,
            ("vm", "unpause"): power.unpause,
            ("vm", "reset"): commands.reset,
            ("vm", "soft-reboot"): commands.soft_reboot,
            ("vm", "freeze"): commands.freeze,
            ("vm", "thaw"): commands.thaw,
            ("vm", "move"): vms.move,
            ("vm", "events"): about.events,
            ("node", "list"): nodes.list,
            ("node", "get"): nodes.get,
            ("node", "cordon"): nodes.cordon,
            ("node", "uncordon"): nodes.uncordon,
            ("node", "drain"): nodes.drain,
            ("node", "fence"): nodes.fence,
            ("node", "unfence"): nodes.unfence,
            ("node", "forget"): nodes.forget,
            ("node", "takeover"): nodes.takeover,
            ("node", "approve"): nodes.approve,
            ("image", "list"): about.images,
            ("image", "pull"): about.pull,
            ("image", "delete"): about.delete_image,
            ("volume", "create"): volumes.create,
            ("volume", "get"): volumes.get,
            ("volume", "list"): volumes.list,
            ("volume", "update"): attachments.update,
            ("volume", "delete"): volumes.delete,
            ("volume", "fill"): volumes.fill,
            ("volume", "move"): moves.move,
            ("volume", "adopt"): volumes.adopt,
            ("volume", "attach"): attachments.attach,
            ("volume", "detach"): attachments.detach,
            ("snapshot", "create"): snapshots.create,
            ("snapshot", "get"): snapshots.get,
            ("snapshot", "list"): snapshots.list,
            ("snapshot", "update"): snapshots.update,
            ("snapshot", "adopt"): snapshots.adopt,
            ("snapshot", "restore"): snapshots.restore,
            ("snapshot", "delete"): snapshots.delete,
            **{("backup", verb): each for verb, each in backups.handlers.items()},
            **{("backup-schedule", verb): each for verb, each in schedules.handlers.items()},
            ("imagename", "set"): names.set,
            ("imagename", "get"): names.get,
            ("imagename", "list"): names.list,
            ("imagename", "delete"): names.delete,
            ("operation", "export"): operations.export,
            ("operation", "flatten"): operations.flatten,
            ("operation", "get"): operations.get,
            ("operation", "list"): operations.list,
            ("operation", "cancel"): operations.cancel,
            ("operation", "delete"): operations.delete,
            ("security-group", "create"): groups.create,
            ("security-group", "get"): groups.get,
            ("security-group", "list"): groups.list,
            ("security-group", "update"): groups.update,
            ("security-group", "delete"): groups.delete,
            ("network", "create"): networks.create,
            ("network", "get"): networks.get,
            ("network", "list"): networks.list,
            ("network", "update"): networks.update,
            ("network", "delete"): networks.delete,
            ("network", "offers"): about.networks,
            ("bus", "status"): about.status,
            ("bus", "rebuild"): self._rebuilds.rebuild,
            ("node", "audit"): self._audits.audit,
            ("node", "quarantine"): self._quarantines.quarantine,
        }
        endpoints = [
            Endpoint(
                f"{resource}-{verb}",
                subjects.api(resource, verb),
                self._when_ready(handler if verb in READS else self._storage.guarded(handler)),
                limit=READS_AT_ONCE.get((resource, verb), REQUESTS_AT_ONCE),
                most_values=CLIENT_VALUES,
            )
            for (resource, verb), handler in handlers.items()
        ]
        watch = Endpoint(
            "vm-watch",
            subjects.api("vm", "watch"),
            self._when_ready(vms.watch),
            limit=self._settings.watches_at_once,
            backlog=0,
            most_values=CLIENT_VALUES,
            running=WATCHES_BEGUN_AT_ONCE,
            displace=self._watches.displace,
        )
        asked = Endpoint(
            "names-ask",
            subjects.names_asks(),
            self._when_ready(NamesApi(self._fleet, self._settings.names_open_to).ask),
            limit=REQUESTS_AT_ONCE,
            most_values=CLIENT_VALUES,
        )
        return [*endpoints, watch, asked]

    def _when_ready(self, handler: Handler) -> Handler:
        """Delay a handler until the first lists of the records are complete.

        The returned handler raises 503 at the request's deadline, and for a request that waited
        while this process was suspended.
        """

        async def handle(request: Request) -> object:
            if not self._feeds.listed:
                await self._listed(request.deadline_s)
            if self._suspensions.waited(request):
                # The client may have repeated the request to another controller. This refusal
                # keeps the request from acting twice.
                message = "the controller was stopped; repeat the request with the same id"
                raise VirtbusError(Code.UNAVAILABLE, "stalled", message, after_ms=1000)
            return await handler(request)

        return handle

    async def _listed(self, deadline_s: float) -> None:
        """Wait for the first lists of the records; raise 503 `recovering` at the deadline."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._feeds.synced()
        except TimeoutError:
            message = "the controller is still reading the bus; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=1000) from None

    async def _beat(self) -> None:
        await self._feeds.synced()  # the monitor would report states of the first lists as changes
        await self._pulse.run()
