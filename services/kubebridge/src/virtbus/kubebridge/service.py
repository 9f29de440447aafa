"""Wires the bridge and runs its loops: reconcilers, watches, and the aggregated API."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from virtbus.bus.ports import Bus
from virtbus.bus.process import notify
from virtbus.kubebridge.core.service.endpoint_slices import SELECTOR
from virtbus.kubebridge.edge import admission
from virtbus.kubebridge.edge.acting import Acting
from virtbus.kubebridge.edge.certificates import Certificates, Where
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.guest_asks import GuestAsks
from virtbus.kubebridge.edge.installation import Installation
from virtbus.kubebridge.edge.kinds import ENDPOINT_SLICE, NAMESPACE, SERVICE, VM, VMI
from virtbus.kubebridge.edge.lease import Lease
from virtbus.kubebridge.edge.node_marks import NodeMarks
from virtbus.kubebridge.edge.objects import Objects
from virtbus.kubebridge.edge.reconciling import Reconciling
from virtbus.kubebridge.edge.service_slices import Followed, ServiceSlices
from virtbus.kubebridge.edge.sweeping import Sweeping
from virtbus.kubebridge.edge.telling import Teller
from virtbus.kubebridge.edge.views import Known, Views
from virtbus.kubebridge.edge.watching import Following
from virtbus.kubebridge.edge.web.site import Site
from virtbus.kubebridge.edge.work import Work
from virtbus.kubebridge.settings import Settings
from virtbus.schemas.network import InterfaceStatus

log = logging.getLogger(__name__)

NAMED_BY = "kube-system"
"""The namespace whose uid names a cluster. It exists as long as the cluster."""
AGAIN_S = 1.0


class Bridge:
    """One bridge. `bus` is virtbus, `cluster` is Kubernetes, and `name` names the cluster."""

    def __init__(self, bus: Bus, cluster: Cluster, settings: Settings, name: str) -> None:
        self.bus = bus
        self.cluster = cluster
        self.settings = settings
        self.name = name
        self.instance = f"{settings.node}-{bus.sources.uuid7()[-12:]}"
        self.known = known = Known(Objects(), Objects(), Views(bus, name))
        self.vms = Following(cluster, VM, known.vms, sources=bus.sources)
        self.vmis = Following(cluster, VMI, known.vmis, sources=bus.sources)
        self.teller = Teller(cluster, self.instance, bus.sources)
        self.acting = Acting(cluster, bus, known, self.teller)
        self.site = Site(bus, cluster, settings.listen)
        whose = Where(settings.namespace, settings.certificates)
        self.certificates = Certificates(cluster, whose, self.site.door.show, bus.sources)
        self.acts = asyncio.Event()
        """Set while this bridge is the leader, which writes."""
        self.guests = GuestAsks(bus, known.views, self.acts)
        looks = Reconciling(cluster, known, self.guests, self.acting, name, bus.sources)
        self.work = Work(looks.look, bus.sources)
        services, slices = Objects(), Objects()
        self.services = Following(cluster, SERVICE, services, sources=bus.sources)
        self.slices = Following(
            cluster, ENDPOINT_SLICE, slices, selector=SELECTOR, sources=bus.sources
        )
        self.service_slices = ServiceSlices(
            cluster,
            Followed(known.vmis, services, slices),
            self._interfaces,
            self.teller.tell,
            self.acts,
        )
        for source in (*known, self.guests):
            source.listeners.append(self.work.add)
        known.views.listeners.append(self.service_slices.changed)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            for piece in self._pieces():
                group.create_task(piece)
            for source in (self.vms, self.vmis, self.known.views):
                await source.synced.wait()
            log.info("ready", extra={"code": "ready"})
            notify("READY=1")
            await asyncio.get_running_loop().create_future()

    def _pieces(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the coroutines that run as long as the bridge does."""
        settings, sources = self.settings, self.bus.sources
        yield self.vms.run()
        yield self.vmis.run()
        yield self.known.views.run()
        yield self.services.run()
        yield self.slices.run()
        yield self.teller.run()
        yield self.certificates.run()
        known = (
            self.site.asking.is_front_proxy if settings.webhook_certificate else admission.anybody
        )
        yield self.site.run(self._against, admission.routes(known))
        yield self._work()
        yield Lease(self.cluster, settings.namespace, self.instance, self.acts, sources).run()

    def _against(self) -> str:
        """Return the reason why the bridge is not ready, or an empty string."""
        if not all(source.synced.is_set() for source in (self.vms, self.vmis, self.known.views)):
            return "the initial lists are not complete yet"
        return "" if self.bus.connected else "the bus is away"

    async def _work(self) -> None:
        """Start once all three caches are complete, to create no existing VM again."""
        for source in (self.vms, self.vmis, self.known.views):
            await source.synced.wait()
        marks = NodeMarks(self.bus, self.cluster, self.acts)
        sweeping = Sweeping(self.cluster, self.known, self.acting, self.work, self.name, self.acts)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.work.run(self.acts))
            group.create_task(sweeping.run())
            group.create_task(marks.run())
            group.create_task(Installation(self.cluster, self.acts, sweeping).run())
            group.create_task(self.guests.run())
            group.create_task(self._slices())

    async def _slices(self) -> None:
        """Run the Service slices. Without permission to read Services, only they do not run."""
        for source in (self.services, self.slices):
            await source.synced.wait()
        await self.service_slices.run()

    def _interfaces(self, uid: str) -> tuple[InterfaceStatus, ...]:
        """Return the interfaces of a VM, as virtbus knows them."""
        view = self.known.views.get(uid)
        return view.interfaces if view is not None else ()


async def name_of(cluster: Cluster, settings: Settings) -> str:
    """Return the name that labels this cluster's VMs on a bus that several clusters may share."""
    while not settings.cluster:
        try:
            namespace = await cluster.get(NAMESPACE, NAMED_BY)
        except Answer as answer:
            log.warning("waiting for the cluster: %s", answer, extra={"code": "cluster_away"})
        else:
            if namespace is not None:
                return str(namespace["metadata"]["uid"])
        await asyncio.sleep(AGAIN_S)
    return settings.cluster
