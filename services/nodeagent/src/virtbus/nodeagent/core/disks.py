"""Renders `<disk>` elements and the controllers of their buses (libvirt: formatdomain)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.pcie import PcieAllocator
from virtbus.schemas.vm import Disk, DiskBus

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SATA_PORTS = 6
"""Ports of one AHCI controller (QEMU: ich9-ahci)."""


@dataclass
class _Place:
    """Assigns target names and addresses to disks.

    All addresses are explicit. Otherwise libvirt would add controllers on the root ports that the
    NICs need.
    """

    used: Counter[DiskBus] = field(default_factory=Counter)

    def next(self, bus: DiskBus, slots: PcieAllocator) -> tuple[str, Element]:
        """Return the target name and the address of the next disk on `bus`."""
        number = self.used[bus]
        # SATA and SCSI disks share the names sda, sdb …
        letter = (
            number if bus is DiskBus.VIRTIO else self.used[DiskBus.SATA] + self.used[DiskBus.SCSI]
        )
        self.used[bus] += 1
        if bus is DiskBus.VIRTIO:
            return f"vd{_LETTERS[letter]}", slots.address()
        controller, unit = divmod(number, _SATA_PORTS) if bus is DiskBus.SATA else (0, number)
        address = el("address", type="drive", controller=controller, bus=0, target=0, unit=unit)
        return f"sd{_LETTERS[letter]}", address


def disk_elements(
    disks: tuple[Disk, ...], files: Mapping[str, DiskSource], slots: PcieAllocator, bootable: str
) -> list[Element]:
    """Return an element for each disk, in the spec's order, with targets vda … or sda ….

    The disk `bootable` gets boot order 1 unless the spec gives it another.
    """
    place = _Place()
    elements = []
    for disk in disks:
        order = disk.boot_order or (1 if disk.name == bootable else None)
        target, address = place.next(disk.bus, slots)
        elements.append(_disk(disk, files.get(disk.name), target, order, address))
    return elements


def _disk(
    disk: Disk, file: DiskSource | None, target: str, order: int | None, address: Element
) -> Element:
    """Return the element of a disk. Without a `file` it is an empty CD-ROM drive."""
    readonly = disk.readonly or disk.device == "cdrom"
    # virtio has no CD-ROM; guests also find a seed on a read-only disk
    device = "disk" if disk.bus is DiskBus.VIRTIO else disk.device
    driver = el(
        "driver",
        name="qemu",
        type=str(file.format) if file else "raw",
        discard=None if readonly else "unmap",
    )
    if disk.error_policy is not None:
        driver.set("error_policy", str(disk.error_policy))
    return el(
        "disk",
        driver,
        *(() if file is None else (el("source", file=file.path), _backing(file))),
        el("target", dev=target, bus=str(disk.bus)),
        el("serial", disk.serial) if disk.serial else None,
        el("readonly") if readonly else None,
        el("boot", order=order) if order else None,
        address,
        type="file",
        device=device,
    )


def _backing(file: DiskSource) -> Element:
    """Return the complete backing chain, so that libvirt never guesses a file's format (IMG-07).

    Everyone may read images, and imaged can replace them. So libvirt, which is root, must not
    change the owner of these paths.
    """
    if not file.backing_path:
        return el("backingStore")
    return el(
        "backingStore",
        el("format", type=str(file.backing_format)),
        el("source", el("seclabel", model="dac", relabel="no"), file=file.backing_path),
        el("backingStore"),
        type="file",
    )


def disk_controllers(disks: tuple[Disk, ...], slots: PcieAllocator) -> list[Element]:
    """Return a virtio-scsi controller if needed, and SATA ones for disks beyond q35's six ports."""
    controllers = []
    if any(disk.bus is DiskBus.SCSI for disk in disks):
        controllers.append(
            el("controller", slots.address(), type="scsi", index=0, model="virtio-scsi")
        )
    sata = sum(disk.bus is DiskBus.SATA for disk in disks)
    controllers += [
        el("controller", slots.address(), type="sata", index=index)
        for index in range(1, -(-sata // _SATA_PORTS))
    ]
    return controllers
