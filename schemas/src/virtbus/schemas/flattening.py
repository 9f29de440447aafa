"""Requests to imaged that end the dependence of disks on layers (ADR 0080)."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.snapshot import SnapshotDisk


class FlattenWork(LenientModel):
    """`rpc.imaged.flatten`: ensure that disks rest on no layers, or cancel the operation `id`.

    The content of the disks does not change. A guest uses the disks only if the work is `live`.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    uid: Uid
    name: Id
    """The name of the VM or the volume."""
    disks: tuple[SnapshotDisk, ...] = Field((), max_length=256)
    live: bool = False
    """True if the guest's QEMU merges the layers. Then imaged checks the free space, and notes the
    result."""
    whole: bool = False
    """True if nothing is copied yet. Then the free space must hold the data of all layers."""
    merged: dict[Id, int] = Field(default_factory=dict, max_length=256)
    """The inode numbers of the files that QEMU has merged, by the disks' names."""
    may_begin: bool = True
    """False if a guest may use the disks. Then work that has not begun yet is refused."""
