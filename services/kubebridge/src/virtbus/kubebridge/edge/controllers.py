"""Registration of the controllers, with the stores and sources that they read."""

import asyncio

from virtbus.bus.client.ports import Bus
from virtbus.kubebridge.core.installation import controller as installation
from virtbus.kubebridge.core.node import labels
from virtbus.kubebridge.core.policy.controller import Policies
from virtbus.kubebridge.core.runtime.controller import (
    BUS_GROUP,
    BUS_NODE,
    BUS_VM,
    ENDPOINT_SLICE,
    GUEST_AGENT,
    KUBEVIRT,
    NETWORK_POLICY,
    NODE,
    ORPHAN,
    SERVICE,
    VM,
    VMI,
)
from virtbus.kubebridge.core.service.controller import Services
from virtbus.kubebridge.core.service.endpoint_slices import SELECTOR
from virtbus.kubebridge.core.vm import reconcile as vm
from virtbus.kubebridge.core.vmi.orphans import Orphans
from virtbus.kubebridge.core.vmi.reconcile import Instances
from virtbus.kubebridge.edge import guest_agents
from virtbus.kubebridge.edge.bus_groups import BusGroups
from virtbus.kubebridge.edge.bus_nodes import BusNodes
from virtbus.kubebridge.edge.cluster import Scope
from virtbus.kubebridge.edge.guest_agents import GuestAgentPoller
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer


def add(
    reconciler: Reconciler, bus: Bus, views: VmInformer, cluster: str, leads: asyncio.Event
) -> tuple[VmInformer, BusNodes, BusGroups]:
    """Add all controllers. Return the sources, which the caller must run."""
    vms, vmis, services, kubevirts = map(reconciler.store, (VM, VMI, SERVICE, KUBEVIRT))
    slices = reconciler.store(ENDPOINT_SLICE, Scope(selector=SELECTOR))
    reconciler.store(NODE, Scope(selector=labels.OURS, metadata_only=True), labels.slim)
    nodes, guests = BusNodes(bus, leads), GuestAgentPoller(bus, views)
    groups = reconciler.groups
    policies = reconciler.store(NETWORK_POLICY)
    orphans = Orphans(cluster, vms, vmis, views)
    reconciler.source(BUS_VM, views, views.synced)
    reconciler.source(BUS_NODE, nodes)
    reconciler.source(BUS_GROUP, groups)
    reconciler.source(GUEST_AGENT, guests)
    reconciler.source(ORPHAN, orphans)
    for controller in (
        vm.controller(vmis),
        Instances(vmis, views, guests, cluster).controller(),
        orphans.controller(),
        Services(services, vmis, slices, views).controller(),
        labels.controller(nodes),
        Policies(policies, groups, {}).controller(),
        installation.controller(kubevirts, orphans),
    ):
        reconciler.add(controller)
    reconciler.add_lane(GUEST_AGENT, guests.lane(), guest_agents.WATCHES)
    return views, nodes, groups
