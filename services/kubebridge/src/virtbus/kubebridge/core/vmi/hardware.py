"""Builds the hardware fields of a VMI's status."""

from collections import Counter
from string import ascii_lowercase
from typing import Any

from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.schemas.vm import Disk, DiskBus

MACHINE = "q35"
"""The machine type of a VMI that names none."""


def described(vmi: Vmi, disks: tuple[Disk, ...]) -> dict[str, Any]:
    """Return the fields of the status. The QEMU of the node decides the machine's version."""
    return {
        "machine": {"type": vmi.machine or MACHINE},
        "qosClass": qos_class(vmi),
        "volumeStatus": volume_status(disks),
    }


def qos_class(vmi: Vmi) -> str:
    """Return the QoS class. A guest always requests memory, so it is never BestEffort."""
    equal = all(
        name in vmi.limits and vmi.requests.get(name, vmi.limits[name]) == vmi.limits[name]
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
