"""Renders `<disk>` elements and the controllers of their buses (libvirt: formatdomain)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from virtbus.nodeagent.core.disk_drivers import blockio_element, driver_element, iotune_element
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.element import Element, el, to_text
from virtbus.nodeagent.core.io_threads import io_threads
from virtbus.nodeagent.core.nvme import nvme_alias
from virtbus.nodeagent.core.pcie import PcieAllocator
from virtbus.schemas.disk import Tray, letters, target_names
from virtbus.schemas.disk_buses import ABILITIES, Verb
from virtbus.schemas.vm import Disk, DiskBus, Domain

_SATA_PORTS = 6
"""Ports of one AHCI controller (QEMU: ich9-ahci)."""
_USB_PORTS = 15
"""Ports of the USB controller: the maximum of a qemu-xhci."""


_ON_PCI = (DiskBus.VIRTIO, DiskBus.NVME)


@dataclass
class _Place:
    """Assigns addresses to disks.

    All addresses are explicit. Otherwise libvirt adds controllers on the root ports of the NICs, or
    derives a SCSI address from the target's letter.
    """

    used: Counter[DiskBus] = field(default_factory=Counter)

    def next(self, bus: DiskBus, slots: PcieAllocator) -> Element:
        """Return the address of the next disk on `bus`."""
        number = self.used[bus]
        self.used[bus] += 1
        if bus in _ON_PCI:
            return slots.address()
        if bus is DiskBus.USB:
            return el("address", type="usb", bus=0, port=number + 1)
        controller, unit = divmod(number, _SATA_PORTS) if bus is DiskBus.SATA else (0, number)
        return el("address", type="drive", controller=controller, bus=0, target=0, unit=unit)


def targets(disks: Sequence[Disk]) -> list[str]:
    """Return libvirt's name of each disk: the guest's, except for NVMe disks.

    libvirt knows those as further virtio disks, so they continue the letters of virtio.
    """
    names = list(target_names(disks))
    number = sum(disk.bus is DiskBus.VIRTIO for disk in disks)
    for at, disk in enumerate(disks):
        if disk.bus is DiskBus.NVME:
            names[at], number = f"vd{letters(number)}", number + 1
    return names


def disk_elements(
    domain: Domain,
    files: Mapping[str, DiskSource],
    slots: PcieAllocator,
    default_order: Mapping[str, int],
) -> list[Element]:
    """Return an element for each disk, in the spec's order, with targets vda … or sda ….

    `default_order` has boot orders of disks without one in the spec.
    """
    place, disks = _Place(), domain.devices.disks
    threads = io_threads(domain).of_disks
    elements = []
    for disk, target in zip(disks, targets(disks), strict=True):
        order = disk.boot_order or default_order.get(disk.name)
        thread, address = threads.get(disk.name), place.next(disk.bus, slots)
        file = None if disk.is_open else files.get(disk.name)
        elements.append(_disk(disk, file, target, order, thread, address))
    return elements


@dataclass(frozen=True, slots=True)
class DriveState:
    """The wanted state of a CD-ROM drive: its element, and the path of its medium (empty: none)."""

    xml: str
    path: str
    force: bool
    """Open a tray that the guest locks."""


def drives(
    domain: Domain, files: Mapping[str, DiskSource], default_order: Mapping[str, int]
) -> dict[str, DriveState]:
    """Return the drives of a domain whose media can be changed, by target.

    Except for the medium, libvirt compares each element with that of the domain.
    """
    disks = domain.devices.disks
    elements = disk_elements(domain, files, PcieAllocator(0), default_order)
    return {
        target: DriveState(
            to_text(element),
            "" if disk.is_open or disk.name not in files else files[disk.name].path,
            disk.tray is Tray.FORCED_OPEN,
        )
        for disk, target, element in zip(disks, targets(disks), elements, strict=True)
        if is_drive(disk)
    }


def is_drive(disk: Disk) -> bool:
    """Return True for a CD-ROM drive whose medium can be changed."""
    refused = ABILITIES[disk.bus][Verb.MEDIA_CHANGE].refused
    return disk.device == "cdrom" and not refused


def trays(disks: Sequence[Disk]) -> dict[str, Tray]:
    """Return the trays that are not closed, by the names of drives."""
    return {disk.name: disk.tray for disk in disks if disk.tray is not None and disk.is_open}


def _disk(
    disk: Disk,
    file: DiskSource | None,
    target: str,
    order: int | None,
    thread: int | None,
    address: Element,
) -> Element:
    """Return the element of a disk. Without a `file` it is an empty CD-ROM drive."""
    readonly = disk.readonly or disk.device == "cdrom"
    bus = DiskBus.VIRTIO if disk.bus is DiskBus.NVME else disk.bus
    # virtio has no CD-ROM; guests also find a seed on a read-only disk
    device = "disk" if bus is DiskBus.VIRTIO else disk.device
    return el(
        "disk",
        driver_element(disk, str(file.format) if file else "raw", thread),
        *(() if file is None else (el("source", file=file.path), _backing(file))),
        iotune_element(disk.limits),
        blockio_element(disk.block_size),
        el("target", dev=target, bus=str(bus)),
        el("serial", disk.guest_serial),
        el("readonly") if readonly else None,
        el("boot", order=order) if order else None,
        address,
        el("alias", name=nvme_alias(disk)) if disk.bus is DiskBus.NVME else None,
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


def disk_controllers(domain: Domain, slots: PcieAllocator) -> list[Element]:
    """Return a virtio-scsi controller if needed, and SATA ones for disks beyond q35's six ports."""
    used = Counter(disk.bus for disk in domain.devices.disks)
    controllers = []
    if used[DiskBus.SCSI]:
        thread = io_threads(domain).of_scsi
        driver = el("driver", iothread=thread) if thread else None
        scsi = el("controller", driver, slots.address(), type="scsi", index=0, model="virtio-scsi")
        controllers.append(scsi)
    controllers += [
        el("controller", slots.address(), type="sata", index=index)
        for index in range(1, -(-used[DiskBus.SATA] // _SATA_PORTS))
    ]
    return controllers


def usb_controller(disks: Sequence[Disk], slots: PcieAllocator) -> Element:
    """Return the USB controller, or the element that keeps libvirt from adding one."""
    if not any(disk.bus is DiskBus.USB for disk in disks):
        return el("controller", type="usb", index=0, model="none")
    return el(
        "controller", slots.address(), type="usb", index=0, model="qemu-xhci", ports=_USB_PORTS
    )
