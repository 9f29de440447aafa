"""Hardware fields of a VMI's status."""

from collections import Counter
from string import ascii_lowercase
from typing import Any

from virtbus.kubebridge.core.plain import Object, part, text
from virtbus.schemas.vm import Disk, DiskBus

MACHINE = "q35"
"""Where the VMI names none."""


def machine(vmi: Object) -> dict[str, str]:
    """As it was asked for; which version that is, the QEMU of its node decides."""
    return {"type": text(vmi, "spec", "domain", "machine", "type") or MACHINE}


def qos_class(vmi: Object) -> str:
    """Of a pod with the VMI's resources; a guest always asks for memory, so never BestEffort."""
    resources = part(vmi, "spec", "domain", "resources")
    limits, requests = part(resources, "limits"), part(resources, "requests")
    equal = all(
        name in limits and requests.get(name, limits[name]) == limits[name]
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if equal else "Burstable"


def volume_status(disks: tuple[Disk, ...]) -> list[dict[str, Any]]:
    """By name; `target` is what a disk is called in the guest, as its node calls them in turn."""
    used: Counter[str] = Counter()
    said = []
    for disk in disks:
        prefix = "vd" if disk.bus is DiskBus.VIRTIO else "sd"
        said.append({"name": disk.name, "target": f"{prefix}{ascii_lowercase[used[prefix]]}"})
        used[prefix] += 1
    return sorted(said, key=lambda one: one["name"])
