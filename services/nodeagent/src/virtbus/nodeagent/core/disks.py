"""Renders `<disk>` elements and the controllers of their buses (libvirt: formatdomain)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from virtbus.nodeagent.core.addresses import (
    NONE,
    ON_PCI,
    SATA_PORTS,
    SCSI,
    USB,
    Addresses,
    assigned,
    of_disk,
    of_sata,
    target,
)
from virtbus.nodeagent.core.disk_drivers import blockio_element, driver_element, iotune_element
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.element import Element, el, to_text
from virtbus.nodeagent.core.io_threads import io_threads
from virtbus.nodeagent.core.network_disks import device_source, network_source
from virtbus.nodeagent.core.nvme import nvme_alias
from virtbus.nodeagent.core.pcie import port_address
from virtbus.schemas.disk import Tray
from virtbus.schemas.disk_rules import is_drive
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.vm import Disk, DiskBus, Domain, VmRecord

_USB_PORTS = 15
"""Ports of the USB controller: the maximum of a qemu-xhci."""


def targets(domain: Domain, kept: Addresses = NONE) -> dict[str, str]:
    """Return libvirt's name of each disk, by disk name. `kept` has the addresses so far."""
    addresses = assigned(domain, kept)
    return {disk.name: target(disk, addresses) for disk in domain.devices.disks}


def disk_elements(
    domain: Domain,
    files: Mapping[str, DiskSource],
    addresses: Addresses,
    default_order: Mapping[str, int],
) -> list[Element]:
    """Return an element for each disk, in the spec's order.

    `default_order` has boot orders for disks whose spec has no order.
    """
    threads = io_threads(domain).of_disks
    return [
        _disk(
            disk,
            None if disk.is_open else files.get(disk.name),
            disk.boot_order or default_order.get(disk.name),
            threads.get(disk.name),
            addresses,
        )
        for disk in domain.devices.disks
    ]


def hot_disk(disk: Disk, file: DiskSource, addresses: Addresses) -> Element:
    """Return the element of a disk that is attached to a running guest.

    The disk gets its boot order and its I/O thread at the next start. The running domain may lack a
    thread for the disk.
    """
    return _disk(disk, file, None, None, addresses)


def volume_alias(name: str) -> str:
    """Return the id of a volume's device. libvirt demands the prefix `ua-`."""
    return f"ua-volume-{name}"


def _address(disk: Disk, addresses: Addresses) -> Element:
    """Prevent libvirt's own choices by an explicit address.

    Without it, libvirt would add controllers on the NICs' root ports, or derive a SCSI address from
    the target's letter.
    """
    if disk.bus in ON_PCI:
        return port_address(addresses, of_disk(disk.name))
    number = addresses[str(disk.bus)][disk.name]
    if disk.bus is DiskBus.USB:
        return el("address", type="usb", bus=0, port=number + 1)
    controller, unit = divmod(number, SATA_PORTS) if disk.bus is DiskBus.SATA else (0, number)
    return el("address", type="drive", controller=controller, bus=0, target=0, unit=unit)


@dataclass(frozen=True, slots=True)
class DriveState:
    """The wanted state of a CD-ROM drive. `path` is the medium, or empty."""

    xml: str
    path: str
    force: bool
    """True to open the tray even if the guest has locked it."""


def drives(
    domain: Domain,
    files: Mapping[str, DiskSource],
    default_order: Mapping[str, int],
    kept: Addresses = NONE,
) -> dict[str, DriveState]:
    """Return the drives with exchangeable media, by target.

    For a change, libvirt requires that only the medium differs from the domain's own element.
    """
    addresses = assigned(domain, kept)
    disks = domain.devices.disks
    elements = disk_elements(domain, files, addresses, default_order)
    return {
        target(disk, addresses): DriveState(
            to_text(element),
            "" if disk.is_open or disk.name not in files else files[disk.name].path,
            disk.tray is Tray.FORCED_OPEN,
        )
        for disk, element in zip(disks, elements, strict=True)
        if is_drive(disk)
    }


def media(record: VmRecord) -> dict[str, str]:
    """Return the image in each closed drive, or the tray's state, by drive name."""
    volumes = {volume.name: volume for volume in record.spec.volumes}
    found = {}
    for disk in filter(is_drive, record.spec.domain.devices.disks):
        if disk.is_open:
            found[disk.name] = str(disk.tray)
        elif disk.name in volumes:
            found[disk.name] = record.image_of(volumes[disk.name])
    return found


def _disk(
    disk: Disk,
    file: DiskSource | None,
    order: int | None,
    thread: int | None,
    addresses: Addresses,
) -> Element:
    """Without a `file`, the disk is an empty CD-ROM drive."""
    readonly = disk.readonly or disk.device == "cdrom"
    remote = file is not None and file.network is not None
    shared = file is not None and file.shared
    bus = DiskBus.VIRTIO if disk.bus is DiskBus.NVME else disk.bus
    # virtio has no CD-ROM; guests also find a seed on a read-only disk
    device = "disk" if bus is DiskBus.VIRTIO else disk.device
    return el(
        "disk",
        driver_element(
            disk, str(file.format) if file else "raw", thread, stops=remote, shared=shared
        ),
        *_source(file),
        iotune_element(disk.limits),
        blockio_element(disk.block_size),
        el("target", dev=target(disk, addresses), bus=str(bus)),
        el("serial", disk.guest_serial),
        el("readonly") if readonly else None,
        el("shareable") if shared else None,
        el("boot", order=order) if order else None,
        _address(disk, addresses),
        _alias(disk, file),
        type=_type(file),
        device=device,
    )


def _source(file: DiskSource | None) -> tuple[Element, ...]:
    if file is None:
        return ()
    if file.network is not None:
        return (network_source(file.network),)
    if file.device_bytes:
        return (device_source(file.path, file.device_bytes), el("backingStore"))
    if file.lent:  # libvirt passes the descriptor, so the path in `file` has no effect
        return (el("source", file=f"/dev/{file.path}", fdgroup=file.path), el("backingStore"))
    return (el("source", file=file.path), _backing(file))


def _type(file: DiskSource | None) -> str:
    if file is None or file.is_file or file.lent:
        return "file"
    return "block" if file.device_bytes else "network"


def _alias(disk: Disk, file: DiskSource | None) -> Element | None:
    """Return the id by which the agent finds the device again; None to let libvirt choose."""
    if disk.bus is DiskBus.NVME:
        return el("alias", name=nvme_alias(disk))
    return el("alias", name=volume_alias(disk.name)) if file is not None and file.volume else None


def _backing(file: DiskSource) -> Element:
    """Return the complete backing chain, so that libvirt never guesses a file's format (IMG-07).

    libvirt must not change owners of images and layers: imaged could put other files in their
    place, and libvirt acts as root. QEMU can read these files, because everyone may.
    """
    chain = [(path, str(ImageFormat.QCOW2)) for path in file.layers]
    if file.backing_path:
        chain.append((file.backing_path, str(file.backing_format)))
    element = el("backingStore")
    for path, of_format in reversed(chain):
        element = el(
            "backingStore",
            el("format", type=of_format),
            el("source", el("seclabel", model="dac", relabel="no"), file=path),
            element,
            type="file",
        )
    return element


def disk_controllers(domain: Domain, addresses: Addresses) -> list[Element]:
    """Return the virtio-scsi controller if needed, and AHCI controllers beyond q35's own."""
    controllers = []
    if any(disk.bus is DiskBus.SCSI for disk in domain.devices.disks):
        controllers.append(scsi_controller(addresses, io_threads(domain).of_scsi))
    last_sata = max(addresses.get("sata", {}).values(), default=0)
    controllers += [
        el("controller", port_address(addresses, of_sata(index)), type="sata", index=index)
        for index in range(1, 1 + last_sata // SATA_PORTS)
    ]
    return controllers


def scsi_controller(addresses: Addresses, thread: int | None = None) -> Element:
    """Return the virtio-scsi controller; `thread` is the number of its I/O thread."""
    driver = el("driver", iothread=thread) if thread else None
    address = port_address(addresses, SCSI)
    return el("controller", driver, address, type="scsi", index=0, model="virtio-scsi")


def usb_controller(disks: Sequence[Disk], addresses: Addresses) -> Element:
    """Return the USB controller, or the element that keeps libvirt from adding one."""
    if not any(disk.bus is DiskBus.USB for disk in disks):
        return el("controller", type="usb", index=0, model="none")
    address = port_address(addresses, USB)
    return el("controller", address, type="usb", index=0, model="qemu-xhci", ports=_USB_PORTS)
