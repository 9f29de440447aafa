"""Requests to imaged about snapshots (`virtbus.node.<id>.rpc.imaged.snapshot…`)."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef


class SnapshotWork(LenientModel):
    """`rpc.imaged.snapshot`: ensure a snapshot of `disks` of the VM or volume `uid`, or cancel it.

    With `restored`, the disks of that snapshot replace `disks`, which become `snapshot`. A cancel
    comes too late once the final step has begun. A guest may use a disk only if the work is `live`.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    resource: Literal["vm", "volume"] = "vm"
    uid: Uid
    name: Id
    disks: tuple[SnapshotDisk, ...] = Field((), max_length=256)
    snapshot: SnapshotRef
    restored: SnapshotRef | None = None
    may_begin: bool = True
    """If False, a guest may use the disks, so work that has not begun yet is refused."""
    layered: bool = False
    """True: the files of the disks become layers; the disks continue in new files (ADR 0061)."""
    live: bool = False
    """True: a guest uses the disks. Its QEMU changes to new files while the step is `layer`."""
    switched: bool | None = None
    """True: QEMU uses the new files, so the work goes forward. False: the work is undone."""


class SnapshotRelease(LenientModel):
    """`rpc.imaged.snapshot-release`: remove the data of a snapshot."""

    ref: SnapshotRef


class SnapshotReleased(LenientModel):
    """The answer: nothing of the snapshot is left. `found` is True if imaged had to remove data."""

    found: bool = False
