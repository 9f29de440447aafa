"""Derives, from a VM's spec, the demand that a node must meet to take the VM."""

from typing import NamedTuple

from virtbus.bus.client.owners import node_of
from virtbus.controller.core.network_demand import (
    NO_TARGETS,
    NetworkDemand,
    Targets,
    network_demand,
)
from virtbus.schemas.host_paths import host_paths
from virtbus.schemas.vm import VmRecord, VmSpec

HOSTNAME = "kubernetes.io/hostname"
"""The label that every node has, with the node's name as its value (as in Kubernetes)."""
QEMU_OVERHEAD_BYTES = 48 * 1024**2
"""Memory of a VM's QEMU besides the guest's memory (measured: PSS 31.5 MiB for a 32 MiB guest)."""
OVERLAY_BYTES = 64 * 1024**2
"""Disk space that counts for a new disk. Overlays are thin, and a small guest's first boot writes
less. Placement notices the later growth of a disk in the node's free bytes."""


class Demand(NamedTuple):
    """The values of a VM that decide which nodes can take it; equal for similar VMs."""

    vcpus: int
    memory_bytes: int
    disk_bytes: int
    accelerator: str
    networks: NetworkDemand
    labels: frozenset[tuple[str, str]]
    host: str = ""
    directories: frozenset[str] = frozenset()
    """The directories and files of the node that the guest uses."""
    namespace: str = ""
    """The namespace to which the directories must be open. It is empty for a VM without
    directories, because VMs of several namespaces can then share a demand. It is also empty for a
    VM of a container runtime, because kubelet decides about its directories."""
    runtime_node: str = ""
    """The node whose container runtime made the VM. No other node can take the VM. Placement does
    not count CPUs and memory there, because kubelet has already granted them (ADR 0059)."""


def demand_of(
    spec: VmSpec, targets: Targets = NO_TARGETS, *, namespace: str = "", runtime_node: str = ""
) -> Demand:
    """Return the demand of a VM; `targets` are the network objects in its spec."""
    directories = frozenset(one.path for one in host_paths(spec))
    return Demand(
        spec.domain.cpu.vcpus,
        memory_of(spec),
        disk_of(spec),
        spec.domain.accelerator,
        network_demand(spec, targets),
        frozenset((key, value) for key, value in spec.node_selector.items() if key != HOSTNAME),
        spec.node_selector.get(HOSTNAME, ""),
        directories,
        namespace if directories and not runtime_node else "",
        runtime_node,
    )


def demand_of_vm(record: VmRecord) -> Demand:
    """Return the demand of a VM with a record."""
    runtime_node = node_of(record.owner)
    return demand_of(
        record.spec, record.network_targets, namespace=record.namespace, runtime_node=runtime_node
    )


def memory_of(spec: VmSpec) -> int:
    """Return the memory that a VM needs on its host, with QEMU's overhead."""
    return spec.domain.memory.guest + QEMU_OVERHEAD_BYTES


def disk_of(spec: VmSpec) -> int:
    """Return the disk space that counts for a VM's new disks."""
    sizes = [v.empty_disk.capacity if v.empty_disk else OVERLAY_BYTES for v in spec.volumes]
    return sum(min(size, OVERLAY_BYTES) for size in sizes)
