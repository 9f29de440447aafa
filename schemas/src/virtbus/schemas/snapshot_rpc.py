"""Requests to imaged about snapshots (`virtbus.node.<id>.rpc.imaged.snapshot…`)."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef


class SnapshotWork(LenientModel):
    """`rpc.imaged.snapshot`: ensure the `snapshot` of `disks` of the VM or volume `uid`, or end it.

    With `restored`, the disks of that snapshot replace `disks`, which become the snapshot. A cancel
    comes too late once the final step has begun. No guest may use a disk.
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
    """False: a guest may use the disks unless this work has begun."""
    layered: bool = False
    """True: the files of the disks become layers; the disks continue in new files (ADR 0061)."""
    live: bool = False
    """True: a guest uses the disks. Its QEMU takes the new files while the step is `layer`."""
    switched: bool | None = None
    """QEMU's answer: it uses the new files, or not. So the work goes forward or back."""


class SnapshotRelease(LenientModel):
    """`rpc.imaged.snapshot-release`: remove the data of a snapshot."""

    ref: SnapshotRef


class SnapshotReleased(LenientModel):
    """Nothing of the snapshot is left; `found`: there was something."""

    found: bool = False
