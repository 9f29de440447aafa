"""Snapshots: frozen copies of the disks of a VM or of a volume (ADR 0054)."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.snapshot_ref import SnapshotRef as SnapshotRef
from virtbus.schemas.volume_ref import VolumeRef


class Origin(LenientModel):
    """The snapshot on which a clone's own disks rest, and the node of the snapshot's data."""

    snapshot: SnapshotRef
    node: Id


class SnapshotDisk(LenientModel):
    """A disk of a snapshot: a volume (`ref`), or an own disk of the VM."""

    name: Id
    """The name of the disk in the VM's spec; `disk` in the snapshot of a volume."""
    ref: VolumeRef | None = None
    size_bytes: int = Field(0, ge=0)
    """The size that a running guest sees; 0: imaged reads the size from the disk's file."""


class SnapshotRecord(LenientModel):
    """`$KV.vm._snap.<namespace>.<token>`: a snapshot. The key is also the claim of its name.

    The operation with the snapshot's uid as its id makes the data. A delete leaves a purge marker
    with the uid for a day.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    resource: Literal["vm", "volume"]
    source: Id
    """The name of the VM or the volume."""
    source_uid: Uid
    node: Id
    """The node of the snapshot's data."""
    protected: bool = False
    """If True, a delete is refused."""
    replaced_by: str = ""
    """The name of the restored snapshot, if this snapshot keeps the disks that a restore replaced;
    otherwise empty."""
    ready: bool = False
    """True once the snapshot's data is complete."""
    size_bytes: int = Field(0, ge=0)
    """The bytes that were copied; 0 if the file system shares them with the source."""
    lost: bool = False
    """True if a person gave up the data together with the node (`node.forget`)."""
    deleting: bool = False
    generation: int = 1
    created_ns: int
    owner: str = ""
    """The owner of the VM or volume, as `VmRecord.owner`."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""


class SnapshotState(StrEnum):
    """The state of a snapshot that users see."""

    CREATING = "Creating"
    """The snapshot's operation has not ended. If the operation fails, the snapshot is removed."""
    READY = "Ready"
    LOST = "Lost"
    """The snapshot's node was forgotten, with the data."""
    DELETING = "Deleting"
    """The snapshot's data is being removed from the node."""
