"""Assembles virtbus-cri, and runs the gRPC server, the watch of VMs, the duties and the logs."""

import asyncio
import logging

from virtbus.bus.runtime.process import notify
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.cri.containers import Containers
from virtbus.cri.core.pod import Pod
from virtbus.cri.duties import Duties
from virtbus.cri.edge import grpc_server
from virtbus.cri.edge.bus_link import BusLink, Connect
from virtbus.cri.edge.cluster import Cluster
from virtbus.cri.edge.guest_shell import GuestShell
from virtbus.cri.edge.guest_traffic import GuestTraffic
from virtbus.cri.edge.guest_usage import GuestUsage
from virtbus.cri.edge.host_alias_reads import HostAliasReads
from virtbus.cri.edge.local_agent import LocalAgent
from virtbus.cri.edge.store import Store
from virtbus.cri.edge.virtlet_reads import VirtletReads
from virtbus.cri.edge.vm_watch import VmWatcher
from virtbus.cri.edge.volume_files import Offered
from virtbus.cri.edge.volume_reads import VolumeReads
from virtbus.cri.event_streams import EventStreams
from virtbus.cri.guest_commands import GuestCommands
from virtbus.cri.image_service import ImageService
from virtbus.cri.images import Images
from virtbus.cri.logs import ContainerLogs
from virtbus.cri.machines import Machines, PodReads
from virtbus.cri.node_state import NodeKeeper
from virtbus.cri.pods import Pods
from virtbus.cri.runtime_service import RuntimeService, StatisticsCalls, StreamCalls
from virtbus.cri.sandboxes import Sandboxes
from virtbus.cri.settings import Settings
from virtbus.cri.statistics import Statistics
from virtbus.cri.streaming import Streaming
from virtbus.cri.virtlet_objects import VirtletObjects
from virtbus.schemas.local_end import LocalEnd

log = logging.getLogger(__name__)

SHELL = GuestShell()


class Cri:
    """The container runtime of one node. `connect` opens a connection to the bus."""

    def __init__(
        self,
        settings: Settings,
        connect: Connect,
        sources: Sources = REAL,
        shell: GuestShell = SHELL,
    ) -> None:
        self._settings = settings
        state = settings.state_dir / "cri"
        self._store = Store(state)
        self._link = BusLink(connect, sources)
        self._pods = Pods(self._store, sources)
        self._logs = ContainerLogs(settings.state_dir / "consoles", state / "logs", sources)
        self._events = EventStreams(sources)
        self._pods.changed = self._changed
        self._node = NodeKeeper(self._store.nodes, self._link, settings.node, settings.pod_network)
        cluster = Cluster(settings.kubeconfig) if settings.kubeconfig else None
        self._virtlet = VirtletObjects(
            cluster, self._store.cluster, settings.image_names, self._node.hostname
        )
        self._images = Images(
            self._store.images, self._link, settings.node, lambda: self._virtlet.config.scheme
        )
        local = LocalAgent(settings.run_dir / "agent.sock")
        self._machines = Machines(
            self._pods,
            self._link,
            lambda: self._node.place._replace(empty_dir_bytes=settings.empty_dir_bytes),
            shell.new_key,
            lambda uid, grace_s: local.end(
                LocalEnd(uid=uid, owner=f"cri-{settings.node}", grace_s=grace_s)
            ),
            PodReads(
                VolumeReads(
                    lambda: Offered(
                        settings.flexvolume_devices or self._virtlet.config.devices,
                        settings.pools_file,
                    )
                ),
                VirtletReads(cluster),
                HostAliasReads(cluster),
            ),
        )
        self._watcher = VmWatcher(self._link, self._pods)
        commands = GuestCommands(self._link, shell, settings.node)
        self._streaming = Streaming(self._pods, self._link, settings.node, commands)

    async def run(self) -> None:
        """Serve until cancelled. The bus may be away at the start.

        Raises:
            VirtbusError: 409 `cri_running`, `socket_taken`. 422: another version wrote the state.
        """
        self._store.open()
        try:
            self._pods.load()
            self._images.load()
            self._node.load()
            await self._virtlet.load()
            made = self._machines
            duties = Duties(self._pods, made.changes, made.networks, self._link.sources)
            async with asyncio.TaskGroup() as group:
                loops = (self._link, self._watcher, self._node, duties, self._logs)
                for loop in (*loops, self._virtlet):
                    group.create_task(loop.run())
                async with (
                    self._streaming.server.serving(),
                    grpc_server.serving(self._settings.socket, self._offers()),
                ):
                    log.info("ready", extra={"code": "ready"})
                    notify("READY=1")
                    await asyncio.get_running_loop().create_future()
        finally:
            self._store.close()

    def _changed(self, before: Pod | None, after: Pod | None) -> None:
        if after is not None:
            self._logs.changed(after)
        self._events.changed(before, after)

    def _offers(self) -> dict[str, grpc_server.Offer]:
        settings = self._settings
        sandboxes = Sandboxes(self._pods, self._machines, settings.runtime_handlers)
        containers = Containers(self._pods, self._machines, self._logs, self._images.known)
        folder, disks = settings.state_dir / "images", settings.state_dir / "disks"
        statistics = Statistics(
            self._pods,
            GuestUsage(settings.emulators_dir, disks),
            GuestTraffic(settings.state_dir / "netd" / "cni" / "results"),
            disks,
        )
        others = {
            **StatisticsCalls(statistics).handlers,
            **StreamCalls(self._streaming).handlers,
        }
        runtime = RuntimeService(sandboxes, containers, others, self._node, settings)
        streams = {"GetContainerEvents": lambda _call: self._events.stream()}
        return {
            "RuntimeService": runtime.offer._replace(streams=streams),
            "ImageService": ImageService(self._images, folder, self._link.sources).offer,
        }
