"""`<disk>` and the controllers that its bus needs (libvirt: formatdomain, Hard drives)."""

from collections.abc import Mapping

from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.slots import Slots
from virtbus.schemas.nodework import DiskFile
from virtbus.schemas.vm import Disk, DiskBus

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PREFIX = {DiskBus.VIRTIO: "vd", DiskBus.SATA: "sd", DiskBus.SCSI: "sd"}


def disk_elements(
    disks: tuple[Disk, ...], files: Mapping[str, DiskFile], slots: Slots, bootable: str
) -> list[Element]:
    """One element a disk, in the spec's order, with targets vda, vdb and so on, or sda, sdb."""
    counts = {"vd": 0, "sd": 0}
    elements = []
    for disk in disks:
        prefix = _PREFIX[disk.bus]
        target = prefix + _LETTERS[counts[prefix]]
        counts[prefix] += 1
        order = disk.boot_order or (1 if disk.name == bootable else None)
        elements.append(_disk(disk, files[disk.name], target, order, slots))
    return elements


def _disk(disk: Disk, file: DiskFile, target: str, order: int | None, slots: Slots) -> Element:
    readonly = disk.readonly or disk.device == "cdrom"
    return el(
        "disk",
        el(
            "driver",
            name="qemu",
            type=str(file.format),
            cache="none" if file.format == "qcow2" else None,
            discard=None if readonly else "unmap",
        ),
        el("source", file=file.path),
        _backing(file),
        el("target", dev=target, bus=str(disk.bus)),
        el("serial", disk.serial) if disk.serial else None,
        el("readonly") if readonly else None,
        el("boot", order=order) if order else None,
        slots.address() if disk.bus is DiskBus.VIRTIO else None,
        type="file",
        device=disk.device,
    )


def _backing(file: DiskFile) -> Element:
    """The chain in full, so that libvirt never looks into a file to guess its format (IMG-07)."""
    if not file.backing_path:
        return el("backingStore")
    return el(
        "backingStore",
        el("format", type=str(file.backing_format)),
        el("source", file=file.backing_path),
        el("backingStore"),
        type="file",
    )


def disk_controllers(disks: tuple[Disk, ...], slots: Slots) -> list[Element]:
    """virtio-scsi where a disk wants it; q35 brings its SATA controller with it."""
    if any(disk.bus is DiskBus.SCSI for disk in disks):
        return [el("controller", slots.address(), type="scsi", index=0, model="virtio-scsi")]
    return []
