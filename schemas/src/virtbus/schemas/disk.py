"""A VM's disk devices, as the guest sees them."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from virtbus.schemas.ids import Id
from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Count

BOOT_ORDER_MAX = 2**31 - 1
"""QEMU stores the boot order in an int32."""


class DiskBus(StrEnum):
    """The device type by which the guest sees a disk."""

    VIRTIO = "virtio"
    SATA = "sata"
    SCSI = "scsi"


class ErrorPolicy(StrEnum):
    """QEMU's reaction to an I/O error on the host (libvirt: formatdomain, error_policy)."""

    STOP = "stop"
    """The guest pauses."""
    IGNORE = "ignore"
    """The guest gets no error."""
    REPORT = "report"
    """The guest sees the error."""
    ENOSPACE = "enospace"
    """The guest pauses if the host's disk is full, and sees every other error."""


class Disk(StrictModel):
    """A disk device; its content is the volume of the same name. A CD-ROM drive may be empty."""

    name: Id
    bus: DiskBus = DiskBus.VIRTIO
    device: Literal["disk", "cdrom"] = "disk"
    readonly: bool = False
    boot_order: Count | None = Field(None, ge=1, le=BOOT_ORDER_MAX)
    serial: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,20}$")] | None = None
    error_policy: ErrorPolicy | None = None
    """None: enospace."""
