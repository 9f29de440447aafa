"""Checks a VM's interfaces: values that exclude each other, or that two devices share.

The controllers check requests with it, and kubebridge checks manifests. A stored spec is read
without these checks, as with `disk_rules`.
"""

from collections.abc import Iterator, Mapping

from virtbus.schemas.errors import Detail
from virtbus.schemas.nic import NicModel
from virtbus.schemas.publish import PublishedPort
from virtbus.schemas.vm import Disk, Interface

NICS = "spec.domain.devices.interfaces"


def nic_problems(nics: Mapping[int, Interface], disks: Mapping[int, Disk]) -> Iterator[Detail]:
    """Yield the problems of a VM's interfaces, by their places in the request's list."""
    orders = {disk.boot_order: f"disk {disk.name!r}" for disk in disks.values() if disk.boot_order}
    indices: dict[int, str] = {}
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


def _published(nics: Mapping[int, Interface]) -> Iterator[Detail]:
    """Yield a problem for each published port that an earlier port of the VM, or a host, takes."""
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
