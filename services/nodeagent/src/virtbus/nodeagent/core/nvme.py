"""Turns virtio disks into NVMe disks, which libvirt 9.0 does not know, by `qemu:override`.

libvirt handles the disk as any other: it opens the file for QEMU's user, makes the block nodes and
sets the PCI address. The override only replaces the name of the device's driver by a constant. So
no value of a request and no path reaches QEMU's command line without libvirt (ADR 0044).
"""

from collections.abc import Sequence

from virtbus.nodeagent.core.element import Element, el
from virtbus.schemas.disk import Disk, DiskBus


def nvme_alias(disk: Disk) -> str:
    """Return the id of an NVMe disk's device. libvirt demands that it begins with `ua-`."""
    return f"ua-nvme-{disk.name}"


def nvme_overrides(disks: Sequence[Disk]) -> Element | None:
    """Return the element that turns virtio disks into NVMe disks; None without NVMe disks."""
    devices = [
        el("qemu:device", _frontend(), alias=nvme_alias(disk))
        for disk in disks
        if disk.bus is DiskBus.NVME
    ]
    return el("qemu:override", *devices) if devices else None


def _frontend() -> Element:
    return el("qemu:frontend", el("qemu:property", name="driver", type="string", value="nvme"))
