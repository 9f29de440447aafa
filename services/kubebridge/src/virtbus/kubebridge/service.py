"""The bridge as a service: wires its objects and runs their loops."""

import asyncio
import logging

from virtbus.bus.client.ports import Bus
from virtbus.bus.runtime.process import notify
from virtbus.kubebridge.core.runtime.controller import BUS_VM, NAMESPACE, SECRET, VM, VMI
from virtbus.kubebridge.edge import admission, controllers
from virtbus.kubebridge.edge.certificates import Certificates
from virtbus.kubebridge.edge.cluster import KubernetesApi, StatusError
from virtbus.kubebridge.edge.lease import LeaseHolder
from virtbus.kubebridge.edge.runtime.event_recorder import EventRecorder
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.kubebridge.edge.web.application import Application
from virtbus.kubebridge.settings import Settings

log = logging.getLogger(__name__)

NAMED_BY = "kube-system"
"""The namespace whose uid names a cluster. It exists as long as the cluster."""
AGAIN_S = 1.0


class Bridge:
    """One bridge. `bus` reaches virtbus, and `cluster` reaches Kubernetes.

    `name` is the label of this cluster's VMs on the bus.
    """

    def __init__(self, bus: Bus, cluster: KubernetesApi, settings: Settings, name: str) -> None:
        self.bus = bus
        self.cluster = cluster
        self.settings = settings
        self.instance = f"{settings.node}-{bus.sources.uuid7()[-12:]}"
        self.leads = asyncio.Event()
        """Set while this bridge leads. Only the leader reconciles, except for certificates."""
        self.views = VmInformer(bus, name)
        self.recorder = EventRecorder(cluster, self.instance, bus.sources)
        self.reconciler = Reconciler(cluster, bus, self.views, self.recorder, self.leads)
        self.sources = controllers.add(self.reconciler, bus, self.views, name, self.leads)
        self.site = Application(bus, cluster, settings.listen)
        self.certificates = Certificates(
            cluster,
            settings.namespace,
            self.site.door.show,
            settings.certificates,
            bus.sources,
        )
        self.reconciler.add_lane(SECRET, self.certificates.lane(), ())

    async def run(self) -> None:
        settings, sources = self.settings, self.bus.sources
        accepted = self.site.asking.is_front_proxy if settings.webhook_certificate else None
        lease = LeaseHolder(
            self.cluster,
            settings.namespace,
            self.instance,
            self.leads,
            self.reconciler.list_again,
            sources,
        )
        async with asyncio.TaskGroup() as group:
            self.reconciler.queue.add(self.certificates.key)
            for loop in (*self.sources, self.recorder, self.reconciler, lease):
                group.create_task(loop.run())
            group.create_task(self.site.run(self._not_ready, admission.routes(accepted)))
            await self.reconciler.until_synced(VM, VMI, BUS_VM)
            log.info("ready", extra={"code": "ready"})
            notify("READY=1")
            await asyncio.get_running_loop().create_future()

    def _not_ready(self) -> str:
        if not self.reconciler.synced(VM, VMI, BUS_VM):
            return "the initial lists are not complete yet"
        return "" if self.bus.connected else "the bus is away"


async def name_of(cluster: KubernetesApi, settings: Settings) -> str:
    """Return the name that labels this cluster's VMs. Several clusters may share a bus."""
    while not settings.cluster:
        try:
            namespace = await cluster.get(NAMESPACE, NAMED_BY)
        except StatusError as answer:
            log.warning("waiting for the cluster: %s", answer, extra={"code": "cluster_away"})
        else:
            if namespace is not None:
                return str(namespace["metadata"]["uid"])
        await asyncio.sleep(AGAIN_S)
    return settings.cluster
