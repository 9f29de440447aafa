"""Builds the hardware fields of a VMI's status."""

from collections import Counter
from string import ascii_lowercase
from typing import Any

from virtbus.kubebridge.core.objects.plain import Object, part, text
from virtbus.schemas.vm import Disk, DiskBus

MACHINE = "q35"
"""The machine type of a VMI that names none."""


def machine(vmi: Object) -> dict[str, str]:
    """Return the requested machine type. The QEMU of the node decides its version."""
    return {"type": text(vmi, "spec", "domain", "machine", "type") or MACHINE}


def qos_class(vmi: Object) -> str:
    """Return the QoS class. A guest always requests memory, so it is never BestEffort."""
    resources = part(vmi, "spec", "domain", "resources")
    limits, requests = part(resources, "limits"), part(resources, "requests")
    equal = all(
        name in limits and requests.get(name, limits[name]) == limits[name]
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if equal else "Burstable"


def volume_status(disks: tuple[Disk, ...]) -> list[dict[str, Any]]:
    """Return the volumes by name. `target` is the name of the disk in the guest."""
    used: Counter[str] = Counter()
    said = []
    for disk in disks:
        prefix = "vd" if disk.bus is DiskBus.VIRTIO else "sd"
        said.append({"name": disk.name, "target": f"{prefix}{ascii_lowercase[used[prefix]]}"})
        used[prefix] += 1
    return sorted(said, key=lambda one: one["name"])
