"""The abilities of each disk bus, with a reason for each refusal.

Admission, the documentation and the tests read this table. The figures were measured with libvirt
9.0 and QEMU 7.2 (ADR 0044).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from virtbus.schemas.disk import DiskBus

MAX_DISKS: Mapping[DiskBus, int] = {
    DiskBus.VIRTIO: 60,
    DiskBus.SATA: 24,
    DiskBus.SCSI: 200,
    DiskBus.USB: 12,
    DiskBus.NVME: 24,
}
"""The most disks of one VM on each bus.

Each virtio or NVMe disk needs a PCIe root port. Every six SATA disks need a controller, which needs
a root port. All SCSI disks are on one controller. The USB controller has 15 ports.
"""


BOOTABLE_SATA = 12
"""The number of SATA disks from which a VM can boot even if all buses are full. The firmware has
memory for at most 14 SATA disks, and does not see further disks."""


class Verb(StrEnum):
    """An ability of a disk."""

    START = "start"
    BOOT = "boot"
    CDROM = "cdrom"
    READONLY = "readonly"
    SERIAL = "serial"
    DISCARD = "discard"
    BLOCK_SIZE = "block size"
    IO_THREAD = "io thread"
    LIMITS = "limits"
    ERROR_POLICY = "error policy"
    HOT_PLUG = "hot-plug"
    UNPLUG = "unplug"
    GROW = "grow"
    MEDIA_CHANGE = "media change"


class Verdict(StrEnum):
    """The verdict: a disk on the bus has the ability, or a request for the ability is refused."""

    WORKS = "works"
    REFUSED = "refused"


class Ability(NamedTuple):
    """A verdict with its reason."""

    verdict: Verdict
    why: str = ""

    @property
    def refused(self) -> bool:
        return self.verdict is Verdict.REFUSED


def _no(why: str) -> Ability:
    return Ability(Verdict.REFUSED, why)


WORKS = Ability(Verdict.WORKS)
_OWN = Ability(Verdict.WORKS, "eject, insert, and insert another image")
_ANY = dict.fromkeys(Verb, WORKS)
_NO_THREAD = _no("QEMU serves this bus in its main loop; use virtio")
_NO_NVME = _no(
    "libvirt does not know this bus, so it can neither add nor remove a disk of a running guest"
)
_NO_DRIVE = _no("the bus has no CD-ROM drives, so no media can be changed")

ABILITIES: Mapping[DiskBus, Mapping[Verb, Ability]] = {
    DiskBus.VIRTIO: _ANY
    | {
        Verb.CDROM: Ability(Verdict.WORKS, "as a read-only disk; it cannot be empty"),
        Verb.HOT_PLUG: Ability(Verdict.WORKS, "a guest has four free PCI ports at its start"),
        Verb.MEDIA_CHANGE: _NO_DRIVE,
    },
    DiskBus.SATA: _ANY
    | {
        Verb.MEDIA_CHANGE: _OWN,
        Verb.BOOT: Ability(Verdict.WORKS, f"from the first {BOOTABLE_SATA} SATA disks of a VM"),
        Verb.BLOCK_SIZE: Ability(
            Verdict.WORKS, "only the physical size; logical blocks have 512 bytes"
        ),
        Verb.IO_THREAD: _NO_THREAD,
        Verb.READONLY: _no("an ATA disk cannot be read-only; make it a cdrom"),
        Verb.HOT_PLUG: _no("QEMU's AHCI controller supports no hot-plug"),
        Verb.UNPLUG: _no("QEMU's AHCI controller supports no hot-plug"),
        Verb.GROW: _no("a guest sees the new size of an ATA disk only at its next start"),
    },
    DiskBus.SCSI: _ANY
    | {
        Verb.IO_THREAD: Ability(Verdict.WORKS, "one for the controller; no disk has its own"),
        Verb.MEDIA_CHANGE: _OWN,
    },
    DiskBus.USB: _ANY
    | {
        Verb.CDROM: _no("QEMU's USB storage is always a hard disk; use sata or scsi"),
        Verb.BLOCK_SIZE: _no("QEMU's USB storage ignores it; use virtio or scsi"),
        Verb.IO_THREAD: _NO_THREAD,
        Verb.DISCARD: _no("USB storage passes no discard on; use virtio, scsi or sata"),
        Verb.HOT_PLUG: Ability(
            Verdict.WORKS,
            "if the VM has another USB disk; only that gives a guest a USB controller",
        ),
        Verb.GROW: _no("a guest sees the new size of a USB disk only at its next start"),
        Verb.MEDIA_CHANGE: _NO_DRIVE,
    },
    DiskBus.NVME: _ANY
    | {
        Verb.READONLY: _no("QEMU's NVMe shows a read-only disk as writable; use virtio or scsi"),
        Verb.CDROM: _no("NVMe has no CD-ROM drives; use sata or scsi"),
        Verb.IO_THREAD: _NO_THREAD,
        Verb.LIMITS: _no("libvirt cannot find an NVMe disk to limit it; use virtio or scsi"),
        Verb.ERROR_POLICY: _no("QEMU's NVMe reports each error to the guest; use virtio or scsi"),
        Verb.HOT_PLUG: _NO_NVME,
        Verb.UNPLUG: _NO_NVME,
        Verb.GROW: _no("QEMU's NVMe reports no new size to a running guest"),
        Verb.MEDIA_CHANGE: _NO_DRIVE,
    },
}
