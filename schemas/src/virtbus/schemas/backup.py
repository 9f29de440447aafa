"""Backups: copies of a VM's disks on a node, which describe themselves (ADR 0068)."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.version import VERSION
from virtbus.schemas.volume_ref import VolumeRef

MAX_CHAIN = 24
"""The longest chain of backups. A restore opens every file of the chain, and its sandbox allows 64
open files."""
CHAIN_BACKUPS = 8
"""The default length of a chain: a full backup and seven increments."""
BITMAP = "virtbus-"
"""The prefix of the bitmaps of backups. virtbus touches only bitmaps with this prefix, or with
`READ_BITMAP`."""
READ_BITMAP = "virtbus.read-"
"""The prefix of the bitmaps of readings (`backup.serve`). Readings have a chain of their own, which
no backup ends."""
MAX_TEXT = 2000
"""The longest text in a manifest, in characters. The limit is for manifests that programs other
than virtbus wrote."""
DIGEST = r"^sha256:[0-9a-f]{64}$"


def bitmap_name(backup: str) -> str:
    """Return the name of the bitmap that marks the writes since a backup."""
    return f"{BITMAP}{backup}"


def read_bitmap(reading: str) -> str:
    """Return the name of the bitmap that marks the writes since a reading."""
    return f"{READ_BITMAP}{reading}"


class BackupMode(StrEnum):
    """The kind of backup that a request wants."""

    AUTO = "auto"
    """An increment if a usable parent exists, otherwise a full backup."""
    FULL = "full"
    INCREMENTAL = "incremental"
    """An increment; an error if no usable parent exists."""


class BackupDisk(LenientModel):
    """A disk in a backup: the file `<name>.qcow2`. An increment has only the changed clusters."""

    name: Id
    """The name of the disk in the VM's spec."""
    volume_uid: Uid | Literal[""] = ""
    """The uid of the volume that was the disk; empty for an own disk of the VM."""
    virtual_size_bytes: int = Field(ge=0)
    size_bytes: int = Field(0, ge=0)
    """The length of the file."""
    digest: str = Field("", pattern=rf"{DIGEST}|^$")
    """The digest of the file."""
    below: tuple[Annotated[str, StringConstraints(max_length=255)], ...] = Field((), max_length=64)
    """The file names of the layers and of the image that the disk rested on. If these differ from
    the parent's, the backup is a full backup: a bitmap does not mark a change of layers."""


class BackupManifest(LenientModel):
    """`<backup_dir>/<id>/backup.json`: all that a restore needs, also in another fleet."""

    schema_version: int = SCHEMA_VERSION
    version: str = Field(VERSION, max_length=64)
    """The version of virtbus that wrote the manifest."""
    id: Uid
    """The id of the backup, and of the operation that made it."""
    namespace: Id
    name: Id
    """The name of the VM."""
    uid: Uid
    """The uid of the VM."""
    node: Id
    owner: str = Field("", max_length=MAX_TEXT)
    schedule: str = Field("", max_length=63)
    """The schedule that made the backup and will remove it; empty if a person made it."""
    created_ns: int
    """The instant of the content. For a VM that was off: the time at which the copy began."""
    number: int = Field(0, ge=0)
    """Greater than the number of every earlier backup in the directory. Backups are ordered by
    number and not by time, because clocks may be set back."""
    parent: Uid | Literal[""] = ""
    """The backup that an increment rests on; empty for a full backup."""
    depth: int = Field(0, ge=0, le=MAX_CHAIN)
    """The number of backups that this backup rests on."""
    full_because: str = Field("", max_length=MAX_TEXT)
    """The reason for a full backup; empty for an increment."""
    bitmap: str = Field("", max_length=64)
    """The bitmap in the disks that marks the writes since this backup; empty if there is none."""
    remark: str = Field("", max_length=MAX_TEXT)
    """The reason why the guest was not frozen; empty if there is none."""
    spec: dict[str, Any] = Field(default_factory=dict)
    """The specification of the VM. It contains no secrets."""
    disks: tuple[BackupDisk, ...] = Field((), max_length=256)
    attempt: str = Field("", max_length=64)
    """The `BackupWork.attempt` that staged the files of an unpublished backup; empty in a published
    backup."""

    @property
    def size_bytes(self) -> int:
        """Return the total length of the backup's files, in bytes."""
        return sum(disk.size_bytes for disk in self.disks)


class BackupCheck(LenientModel):
    """`<backup_dir>/<id>/verified.json`: the result of the last verification."""

    operation: Uid
    at_ns: int
    problem: str = Field("", max_length=MAX_TEXT)
    """The damage that was found; empty if the whole chain agrees with its manifests."""


class HeldBackup(LenientModel):
    """A backup in the directory of a node. An unreadable `manifest` is None."""

    id: Uid
    manifest: BackupManifest | None = None
    check: BackupCheck | None = None
    children: tuple[Uid, ...] = ()
    """The increments that rest on this backup."""


# --- requests to imaged -------------------------------------------------------------------------
class BackedDisk(LenientModel):
    """A disk that is backed up: a volume (`ref`), or an own disk of the VM."""

    name: Id
    ref: VolumeRef | None = None
    size_bytes: int = Field(0, ge=0)
    """The size that a running guest sees. If it is 0, imaged reads the size from the file."""


class BackupWork(LenientModel):
    """`rpc.imaged.backup`: ensure the backup of operation `id`, or cancel it.

    imaged copies the disks of a VM that is off. QEMU writes the disks of a running guest (`live`)
    to files that imaged has staged, while the operation's step is `push`.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    uid: Uid
    namespace: Id
    name: Id
    node: Id
    owner: str = ""
    schedule: str = ""
    spec: dict[str, Any] = Field(default_factory=dict)
    disks: tuple[BackedDisk, ...] = Field((), max_length=256)
    mode: BackupMode = BackupMode.AUTO
    chain: int = Field(CHAIN_BACKUPS, ge=1, le=MAX_CHAIN)
    """The longest chain, in backups. After a chain of this length, the next backup is full."""
    may_begin: bool = True
    """False if a guest may use the disks. Then work that has not begun yet is refused."""
    live: bool = False
    bitmaps: tuple[str, ...] | None = None
    """The bitmaps that QEMU reports for every disk. If given, imaged stages the files again."""
    attempt: str = Field("", max_length=64)
    """The id of this attempt. Files that were staged for another attempt are not stored."""
    pushed: bool = False
    """True once QEMU has written all files."""
    at_ns: int = 0
    """The instant of the content, once `pushed`."""
    remark: str = ""


class ScratchWork(LenientModel):
    """`rpc.imaged.scratch`: check the space for the files of reading `id`, or remove the files.

    While a reader has the disks, the guest's QEMU saves old data to these files before it
    overwrites the data.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    stage: bool = False
    """If True, imaged first writes empty files for `disks`, in place of earlier files."""
    disks: tuple[BackedDisk, ...] = Field((), max_length=256)


class VerifyWork(LenientModel):
    """`rpc.imaged.backup-verify`: ensure that operation `id` reads a backup and its chain."""

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    backup: Uid


class BackupsAsk(LenientModel):
    """`rpc.imaged.backups`: list, get or delete backups of the node's directory."""

    do: Literal["list", "get", "delete"] = "list"
    after: str = Field("", max_length=64)
    """A list contains only backups with a greater id than this one."""
    id: Uid | None = None


class HeldBackups(LenientModel):
    """Backups of a node; `enabled` is False if the node has no directory for backups."""

    enabled: bool = True
    items: tuple[HeldBackup, ...] = ()
    more: bool = False
