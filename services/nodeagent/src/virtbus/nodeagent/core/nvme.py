"""Turns virtio disks into NVMe disks by `qemu:override`, because libvirt 9.0 has no NVMe disks.

libvirt handles the disk as a virtio disk: file permissions, block nodes, PCI address. The override
only replaces the device's driver by a constant. Thus all paths and values of requests reach QEMU
through libvirt (ADR 0044).
"""

from collections.abc import Sequence

from virtbus.nodeagent.core.element import Element, el
from virtbus.schemas.disk import Disk, DiskBus


def nvme_alias(disk: Disk) -> str:
    """Return the id of an NVMe disk's device. libvirt demands the prefix `ua-`."""
    return f"ua-nvme-{disk.name}"


def nvme_overrides(disks: Sequence[Disk]) -> Element | None:
    """Return the overriding element; None without NVMe disks."""
    devices = [
        el("qemu:device", _frontend(), alias=nvme_alias(disk))
        for disk in disks
        if disk.bus is DiskBus.NVME
    ]
    return el("qemu:override", *devices) if devices else None


def _frontend() -> Element:
    return el("qemu:frontend", el("qemu:property", name="driver", type="string", value="nvme"))
