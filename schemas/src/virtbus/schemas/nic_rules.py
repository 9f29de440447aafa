"""Checks a VM's interfaces: values that exclude each other, or that two devices share.

The controllers check requests, and kubebridge checks manifests. A stored spec is read without these
checks, so a stricter rule affects no existing VM.
"""

from collections.abc import Iterator, Mapping

from virtbus.schemas.errors import Detail
from virtbus.schemas.nic import E1000_MAX, QUEUES_IN_ALL, NicBinding, NicModel
from virtbus.schemas.publish import PublishedPort
from virtbus.schemas.vm import Disk, Interface

NICS = "spec.domain.devices.interfaces"


def nic_problems(nics: Mapping[int, Interface], disks: Mapping[int, Disk]) -> Iterator[Detail]:
    """Yield the problems of a VM's interfaces; the keys are indices in the request's lists."""
    orders = {disk.boot_order: f"disk {disk.name!r}" for disk in disks.values() if disk.boot_order}
    indices: dict[int, str] = {}
    yield from _sums(nics)
    for index, nic in nics.items():
        path, shown = f"{NICS}[{index}]", f"interface {nic.name!r}"
        order, acpi = nic.boot_order, nic.acpi_index
        if order is not None and orders.setdefault(order, shown) != shown:
            message = f"{order} is the boot order of {orders[order]}, too; give each its own"
            yield Detail(path=f"{path}.boot_order", message=message)
        if acpi is not None and indices.setdefault(acpi, shown) != shown:
            message = f"{acpi} is the index of {indices[acpi]}, too; give each its own"
            yield Detail(path=f"{path}.acpi_index", message=message)
        if (nic.queues or 1) > 1 and nic.model is not NicModel.VIRTIO:
            message = f"{nic.model} has one queue; write model: virtio, or leave queues out"
            yield Detail(path=f"{path}.queues", message=message)
    yield from _published(nics)
    yield from _masqueraded(nics)


def _masqueraded(nics: Mapping[int, Interface]) -> Iterator[Detail]:
    """Yield the problems of masquerade, and of its fields in interfaces without masquerade."""
    first = ""
    for index, nic in nics.items():
        path = f"{NICS}[{index}]"
        if nic.binding is not NicBinding.MASQUERADE:
            given = {
                "ports": nic.binding is not NicBinding.PASST and nic.ports,
                "vm_network_cidr": nic.vm_network_cidr,
                "vm_ipv6_network_cidr": nic.vm_ipv6_network_cidr,
            }
            for field in (name for name, value in given.items() if value):
                others = ", or passt" if field == "ports" else ""
                message = f"only with binding: masquerade{others}; write that, or leave it out"
                yield Detail(path=f"{path}.{field}", message=message)
            continue
        if first:
            message = f"interface {first!r} has masquerade, and a VM has one; write bridge"
            yield Detail(path=f"{path}.binding", message=message)
        first = first or nic.name
        for at, port in enumerate(nic.publish):
            if nic.ports and not any(one.has(port.guest_port, port.protocol) for one in nic.ports):
                message = f"{port.guest_port}/{port.protocol} is not among ports; declare it there"
                yield Detail(path=f"{path}.publish[{at}].guest_port", message=message)


def _sums(nics: Mapping[int, Interface]) -> Iterator[Detail]:
    """Yield a problem at the interface that makes the queues or the e1000 devices too many."""
    queues = e1000 = 0
    for index, nic in nics.items():
        own = nic.queues or 1
        queues += own
        if queues > QUEUES_IN_ALL >= queues - own:
            message = f"a VM has at most {QUEUES_IN_ALL} queues in all, here {queues}; lower some"
            yield Detail(path=f"{NICS}[{index}].queues", message=message)
        e1000 += nic.model is not NicModel.VIRTIO
        if nic.model is not NicModel.VIRTIO and e1000 == E1000_MAX + 1:
            message = f"a VM has at most {E1000_MAX} of e1000 and e1000e; write model: virtio"
            yield Detail(path=f"{NICS}[{index}].model", message=message)


def _published(nics: Mapping[int, Interface]) -> Iterator[Detail]:
    """Yield a problem for each published port that an earlier interface or a tunnel uses."""
    earlier: list[PublishedPort] = []
    for index, nic in nics.items():
        for at, port in enumerate(nic.publish):
            if any(port.clashes(other) for other in earlier):
                message = f"{port.place} is published twice; give each its own host_port"
                yield Detail(path=f"{NICS}[{index}].publish[{at}].host_port", message=message)
            if port.is_of_tunnels:
                message = f"hosts use {port.place} for overlay networks; publish another port"
                yield Detail(path=f"{NICS}[{index}].publish[{at}].host_port", message=message)
            earlier.append(port)
