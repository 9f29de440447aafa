"""Runs netd: handles records and requests, and reports networks."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from virtbus.bus.client.ports import (
    Bus,
    Endpoint,
    Entry,
    Gate,
    Handler,
    Request,
    ServiceInfo,
    WatchMark,
)
from virtbus.bus.client.record_worker import RecordWorker
from virtbus.bus.client.service_report import report_state
from virtbus.bus.client.tracing import SpanFactory, no_span
from virtbus.bus.runtime import process
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.bridge_ports import nearly_full
from virtbus.netd.core.tenancy import namespaces_of
from virtbus.netd.edge.fd_passing import Handover, HandoverServer
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.segments import SegmentLink
from virtbus.netd.edge.wrapper_install import install
from virtbus.netd.host_networks import HostNetworks
from virtbus.netd.name_questions import NameQuestions
from virtbus.netd.network_step import NetworkStep
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.overlay_peers import OverlayPeers
from virtbus.netd.path_check import PathCheck
from virtbus.netd.plugin_sweep import PluginSweep
from virtbus.netd.reporter import NetworkReporter
from virtbus.netd.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.counters import Counters, CountersAsk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.group_rebuild import GroupsRead, KnownGroups
from virtbus.schemas.network import NetworkInfo
from virtbus.schemas.network_object import BUILT_IN
from virtbus.schemas.network_path import NetworkAsk, NetworkView
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import (
    ANY_EPOCH,
    Ensure,
    HeldResources,
    Inspect,
    NetReady,
    Release,
    ReleaseReply,
    ServiceReport,
)
from virtbus.schemas.overlay import TunnelEnd
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import valid_uid, validate

log = logging.getLogger(__name__)

CATCH_UP_S = 2.0
"""The time that a request for a network waits for its record from the bus."""
COMPILER: str | None = "gcc"
"""Compiles vmwrapper. With None, the slower Python version is installed."""


class Netd:
    """The netd service of one node."""

    def __init__(
        self,
        bus: Bus,
        networks: HostNetworks,
        span: SpanFactory = no_span,
        gate: Gate | None = None,
    ) -> None:
        self._bus = bus
        self._gate = gate
        self._settings = settings = networks.settings
        self._span = span
        self._networks = networks
        self._ports = ports = networks.ports
        self._attachments = networks.attachments
        self._leftovers = OrphanAudit(self._ports, self._attachments)
        self._paths = PathCheck(self._ports, self._attachments, self._leftovers)
        self._reporter = NetworkReporter(bus, settings.node)
        self._attachments.given_up = self._reporter.given_up
        self._changed = asyncio.Event()
        self._peers = OverlayPeers(ports.attachers, self._attachments)

    async def run(self) -> None:
        """Serve until cancelled, within `HostNetworks.running`."""
        settings = self._settings
        handover = HandoverServer(
            settings.run_dir / "netd", self._attachments, str(settings.emulator), self._handed_over
        )
        info = ServiceInfo(
            "virtbus-netd", VERSION, "networks of a node's VMs", {"node": settings.node}
        )
        self._networks.permit(NameQuestions(self._bus, settings.node).ask)
        async with asyncio.TaskGroup() as group:
            step = NetworkStep(self._attachments, self._reporter)
            work = RecordWorker(group, step, self._reporter, self._span)
            async with self._bus.serve(info, self._endpoints(work)):
                group.create_task(
                    report_state(self._bus, settings.node, self._changed, self._state)
                )
                group.create_task(handover.run())
                await in_thread(
                    lambda: install(
                        settings.wrapper_dir,
                        handover.wrapper_path,
                        emulator=settings.emulator,
                        memo=settings.state_dir / "netd" / "wrapper.json",
                        compiler=COMPILER,
                    )
                )
                await self._networks.until_recovered()
                self._changed.set()
                process.notify("READY=1")
                held = len(self._attachments.resources())
                log.info("ready: %d networks", held, extra={"code": "ready"})
                for duty in self._duties():
                    group.create_task(duty())
                group.create_task(self._peers.run(lambda: work.synced))
                async with self._bus.node_watch(settings.node, "netd", self._gate) as watch:
                    await work.follow(
                        watch, settings.node, of_node=self._of_node, compare=self._compare
                    )

    def _duties(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        sweep = PluginSweep(self._ports.cni, self._attachments)
        report = partial(self._networks.segments.report, self._reporter.ready)
        ended = partial(self._networks.passt.report, self._reporter.found)
        return report, ended, self._networks.groups.run, sweep.run

    def _of_node(self, item: Entry | WatchMark) -> None:
        self._networks.groups.see(item)
        if isinstance(item, Entry):
            self._networks.reach.see(item)
            self._peers.see(item)

    def _handed_over(self, done: Handover) -> None:
        took_ms = (done.granted_ns - done.asked_ns) / 1e6
        extra = {"code": "handed_over", "uid": done.uid}
        log.info("descriptors handed over in %.1f ms", took_ms, extra=extra)
        self._reporter.wrapped(done)

    async def _compare(self) -> None:
        try:
            await self._attachments.replug()
            for finding in await self._attachments.compare():
                await self._reporter.found(finding)
        except (VirtbusError, OSError) as error:
            extra = {"code": "compare_failed"}
            log.warning("comparison of networks failed: %s", error, extra=extra)

    # --- requests ---------------------------------------------------------------------------
    def _endpoints(self, work: RecordWorker[NetReady]) -> list[Endpoint]:
        async def ensure(request: Request) -> NetReady:
            asked = validate(Ensure, request.data).record
            # before the attempt: a recovery is no failure of the VM, and needs no event
            self._attachments.refuse_while_recovering()
            ready = await work.join_or_attempt(await _newest(work, asked))
            if ready.error is not None:
                raise VirtbusError.of(ready.error)
            return ready

        async def release(request: Request) -> ReleaseReply:
            want = validate(Release, request.data)
            uid = work.end(want)
            with self._span("virtbus release network", uid=uid):
                if await self._release(uid, want.epoch, forced=want.forced):
                    self._reporter.released(uid, want.epoch)
                    log.info("network released", extra={"code": "released", "uid": uid})
            return ReleaseReply(uid=uid)

        async def inspect(request: Request) -> HeldResources:
            return await self._inspect(validate(Inspect, request.data))

        async def traffic(request: Request) -> Counters:
            return await self._traffic(valid_uid(validate(CountersAsk, request.data).uid))

        async def groups(request: Request) -> KnownGroups:
            return self._networks.groups.known(validate(GroupsRead, request.data).after)

        handlers: dict[str, Handler] = {
            "ensure": ensure,
            "release": release,
            "inspect": inspect,
            "traffic": traffic,
            "nic": self._nic,
            "path": self._network,
            "groups": groups,
        }
        return [
            Endpoint(verb, subjects.rpc(self._settings.node, "netd", verb), handler)
            for verb, handler in handlers.items()
        ]

    async def _nic(self, request: Request) -> NicDone:
        want = validate(NicWork, request.data)
        valid_uid(want.uid)
        return await self._attachments.change_nic(want)

    async def _network(self, request: Request) -> NetworkView:
        want = validate(NetworkAsk, request.data)
        valid_uid(want.uid)
        view = await self._paths.view(want)
        return view.model_copy(update={"node": self._settings.node})

    async def _inspect(self, want: Inspect) -> HeldResources:
        if want.mend:
            await self._leftovers.mend()
        held = await self._leftovers.held()
        if want.uid is not None:
            uid = valid_uid(want.uid)
            return HeldResources(things={uid: held[uid]} if uid in held else {})
        return HeldResources(things=held, faults=await self._leftovers.faults())

    async def _traffic(self, uid: str) -> Counters:
        self._attachments.refuse_while_recovering()
        if uid in self._attachments.begun():
            message = f"netd is building the network of VM {uid}; try again in a second"
            raise VirtbusError(Code.UNAVAILABLE, "network_begun", message, after_ms=500)
        found = [each for each in self._attachments.ready() if each.uid == uid]
        if not found:
            message = (
                f"netd has no network of VM {uid}; a VM that has never started has no counters"
            )
            raise VirtbusError(Code.NOT_FOUND, "not_attached", message)
        counted = await in_thread(lambda: self._leftovers.links.counters(found[0]))
        return self._ports.dhcp.with_floods(counted)

    async def _release(self, uid: str, epoch: int, *, forced: bool) -> bool:
        """Remove the network of `uid`. Return False if none exists.

        `ANY_EPOCH`, which audits send, also removes orphans.
        """
        if await self._attachments.release(uid, epoch, forced=forced):
            return True
        return epoch >= ANY_EPOCH and await self._leftovers.remove(uid)

    # --- reports -----------------------------------------------------------------------------
    async def _state(self) -> ServiceReport:
        state = NodeState.RECOVERING if self._attachments.recovering else NodeState.READY
        six = self._settings.subnet6
        default = NetworkInfo(
            name=BUILT_IN,
            kind="nat",
            subnet=str(self._settings.subnet.network),
            subnet6=str(six.network) if six is not None else "",
        )
        others = [
            NetworkInfo(
                name=name,
                kind="cni",
                detail={"file": path.name},
                namespaces=namespaces_of(name, self._settings.network_namespaces),
            )
            for name, path in self._ports.cni.networks().items()
        ]
        links, tunnel, addresses = await in_thread(self._offered)
        return ServiceReport(
            service="netd",
            state=ServiceState(
                state=state,
                version=VERSION,
                message=nearly_full(self._attachments.nics()),
                seen_ns=self._bus.sources.time_ns(),
            ),
            networks=(default, *others),
            cni_plugins=self._settings.cni_plugins_allowed,
            links={link.name: str(link.carries) for link in links},
            link_mtus={link.name: link.mtu for link in links},
            tunnel=tunnel,
            bindings=self._ports.attachers.passt.bindings,
            addresses=addresses,
        )

    def _offered(self) -> tuple[list[SegmentLink], TunnelEnd | None, tuple[str, ...]]:
        attachers = self._ports.attachers
        return attachers.segments.offered(), attachers.tunnels.end(), attachers.bridges.addresses()


async def _newest(work: RecordWorker[NetReady], record: VmRecord) -> VmRecord:
    """Return a VM's record from the bus, or `record` if the bus has only an older record.

    When netd has received the record, it has also received all keys that were written before the
    record, such as keys of security groups. An older record in a late request has no effect.

    Raises:
        VirtbusError: 503 `record_late`: the record did not come within CATCH_UP_S.
    """
    found = await work.newest(record, CATCH_UP_S)
    if found is None:
        message = (
            "netd has not received this record from the bus, so it lists all records again; the "
            "agent repeats its request. If this lasts: `virtbus bus rebuild --dry-run`"
        )
        raise VirtbusError(Code.UNAVAILABLE, "record_late", message, after_ms=500)
    return found


async def teardown(settings: Settings, ports: HostPorts) -> None:
    """Remove every network of this host, even of running guests, for an uninstall.

    Raises:
        VirtbusError: 409 `netd_running` while a netd runs here, or the error of a CNI plugin.
    """
    attachments = Attachments(ports, settings.site())
    try:
        await attachments.recover()
        for uid in attachments.resources():
            await attachments.release(uid, sys.maxsize)
        await attachments.tidy()
        await ports.resolver.end()
    finally:
        ports.dhcp.close()
        ports.files.close()
        ports.attachers.plugin_reach.close()
