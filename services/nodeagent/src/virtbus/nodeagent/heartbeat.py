"""Writes the node's heartbeat with a TTL, every few seconds and at once on a change."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.subscriptions import hear
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.core.ports import HostFacts
from virtbus.nodeagent.image_report import ImageReport
from virtbus.nodeagent.instance import Ownership
from virtbus.nodeagent.pool_report import PoolsReport
from virtbus.nodeagent.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.fitting import fitted_bytes
from virtbus.schemas.network_object import BUILT_IN
from virtbus.schemas.node import NodeRecord, NodeState, ServiceState
from virtbus.schemas.node_rpc import ServiceReport
from virtbus.schemas.version import VERSION

log = logging.getLogger(__name__)

TTL_S = 15.0
LEFT_TTL_S = 60.0
GOODBYE_S = 1.0
SILENT_S = 12.0
"""Three intervals of the reports of imaged and netd. A service that is silent for longer is not
ready."""
SERVICES = ("imaged", "netd")


class Heartbeat:
    """Writes the node's record at `$KV.node.<id>`."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        host: Callable[[], HostFacts],
        own: Ownership | None = None,
    ) -> None:
        self.state = NodeState.RECOVERING
        self._bus = bus
        self._settings = settings
        self.host = host
        self._own = own
        self._instance = own.me.instance if own is not None else bus.sources.uuid7()
        self._started_ns = bus.sources.time_ns()
        self._message = self._blind = ""
        self.held = 0
        """The number of VMs here without a record on the bus."""
        self._reports: dict[str, ServiceReport] = {}
        self._heard_s: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._images = ImageReport(bus, settings.node)
        self.pools = PoolsReport(bus, settings.node)

    def blind(self, why: str) -> None:
        """Report why libvirt does not answer; with an empty `why`, report that libvirt answers."""
        if self._blind != why:
            self._blind = why
            self._wake.set()

    def report(self, state: NodeState, message: str = "") -> None:
        if (self.state, self._message) != (state, message):
            self.state, self._message = state, message
            self._wake.set()

    async def run(self) -> None:
        """Send heartbeats until cancelled.

        An agent that holds the node sends LEFT as its last heartbeat, also after an error. Silence
        without LEFT means that the agent was killed, or that its host or network failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hear())
                group.create_task(self._images.run())
                group.create_task(self.pools.run())
                while True:
                    self._wake.clear()  # cleared first: a change during a beat needs another beat
                    await self._beat()
                    await wait_for_event(self._wake, self._settings.heartbeat_s)
        finally:
            self.state = NodeState.LEFT
            if self._own is None or self._own.held:  # no other instance acts for the node
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await self._beat(ttl_s=LEFT_TTL_S)

    async def _hear(self) -> None:
        async with self._bus.subscribe(
            subjects.service_report_all(self._settings.node)
        ) as messages:
            await hear(messages, ServiceReport, self._take_report)

    def _take_report(self, service_report: ServiceReport) -> None:
        if service_report.service not in SERVICES:
            return
        before = self._reports.get(service_report.service)
        self._reports[service_report.service] = service_report
        self._heard_s[service_report.service] = asyncio.get_running_loop().time()
        if service_report.service == "imaged":
            self._images.set_keys(service_report.image_keys)
            self.pools.tell("imaged", service_report.pools)
        if before is None or _urgent(before) != _urgent(service_report):
            self._wake.set()

    async def _beat(self, ttl_s: float = TTL_S) -> None:
        record = self._record()
        try:
            await self._bus.put(
                subjects.node_record(record.node), fitted_bytes(record), ttl_s=ttl_s
            )
        except BusError as error:
            log.info("heartbeat: %s", error, extra={"code": "heartbeat_late"})

    def _state(self) -> tuple[NodeState, str]:
        if self._blind and self.state is not NodeState.LEFT:
            return NodeState.RECOVERING, self._blind
        return self.state, self._message

    def _services(self) -> dict[str, ServiceState]:
        now_s = asyncio.get_running_loop().time()
        state, message = self._state()
        services = {"agent": ServiceState(state=state, version=VERSION, message=message)}
        for name in SERVICES:
            service_report = self._reports.get(name)
            if service_report is None or now_s - self._heard_s[name] > SILENT_S:
                services[name] = ServiceState(message="does not answer")
            else:
                services[name] = service_report.state
        return services

    def _record(self) -> NodeRecord:
        host, settings = self.host(), self._settings
        networks = [
            network
            for service_report in self._reports.values()
            for network in service_report.networks
        ]
        addresses = {
            address
            for service_report in self._reports.values()
            for address in service_report.addresses
        }
        return NodeRecord(
            node=settings.node,
            hostname=host.hostname,
            instance=self._instance,
            state=self._state()[0],
            cpus=host.cpus,
            memory_bytes=host.memory_bytes,
            disk_bytes=host.disk_bytes,
            disk_free_bytes=host.disk_free_bytes,
            disk_reserve_bytes=host.disk_reserve_bytes,
            max_vcpus=host.max_vcpus,
            kubernetes_cpus=settings.kubernetes_cpus,
            kubernetes_memory_bytes=settings.kubernetes_memory,
            accelerators=host.accelerators,
            labels=settings.labels,
            networks=tuple(sorted(network.name for network in networks)) or ("default",),
            network_namespaces={
                network.name: network.namespaces for network in networks if network.namespaces
            },
            guest_subnet=next((one.subnet for one in networks if one.name == BUILT_IN), ""),
            guest_subnet6=next((one.subnet6 for one in networks if one.name == BUILT_IN), ""),
            cni_plugins=tuple(
                plugin for report in self._reports.values() for plugin in report.cni_plugins
            ),
            links={
                name: kind
                for report in self._reports.values()
                for name, kind in report.links.items()
            },
            link_mtus={
                name: mtu
                for report in self._reports.values()
                for name, mtu in report.link_mtus.items()
            },
            tunnel=next((one.tunnel for one in self._reports.values() if one.tunnel), None),
            bindings=tuple(
                binding for report in self._reports.values() for binding in report.bindings
            ),
            directories=settings.directories_allowed,
            addresses=tuple(sorted(addresses)),
            services=self._services(),
            versions=dict(host.versions),
            held=self.held,
            quarantined=sum(
                service_report.quarantined for service_report in self._reports.values()
            ),
            quarantined_bytes=sum(
                service_report.quarantined_bytes for service_report in self._reports.values()
            ),
            image_bytes=sum(report.image_bytes for report in self._reports.values()),
            image_quota_bytes=sum(report.image_quota_bytes for report in self._reports.values()),
            started_ns=self._started_ns,
            time_ns=self._bus.sources.time_ns(),
            host=self._own.me.host if self._own is not None else None,
        )


def _urgent(report: ServiceReport) -> tuple[object, ...]:
    """Return the fields of a report whose change triggers a heartbeat at once."""
    own = report.networks, report.cni_plugins, report.links, report.tunnel, report.addresses
    more = report.bindings, report.link_mtus, report.quarantined_bytes
    return report.state.state, own, more
