"""Finds the backup that an increment may rest on (ADR 0068)."""

from collections.abc import Collection

from virtbus.imaged.edge.backup_files import BackupFiles
from virtbus.schemas.backup import BackupDisk, BackupManifest, BackupMode, BackupWork
from virtbus.schemas.errors import VirtbusError


def parent_of(
    files: BackupFiles, want: BackupWork, disks: tuple[BackupDisk, ...], bitmaps: Collection[str]
) -> tuple[BackupManifest | None, str]:
    """Return the parent of an increment, or None and the reason for a full backup.

    `disks` are the VM's disks now. `bitmaps` are the usable bitmaps that all `disks` have.
    """
    if want.mode is BackupMode.FULL:
        return None, "it was requested"
    found = files.of_vm(want.uid)
    if not found:
        return None, "it is the first backup of the VM"
    parent = next((one for one in found if one.bitmap in bitmaps), None)
    if parent is None:
        return None, (
            "the disks have no bitmap of an earlier backup: the guest ended without a stop, a disk "
            "grew while the VM was off, or the backup is gone or was made while the VM was off"
        )
    return (None, why) if (why := _unfit(files, parent, want, disks)) else (parent, "")


def _unfit(
    files: BackupFiles, parent: BackupManifest, want: BackupWork, disks: tuple[BackupDisk, ...]
) -> str:
    if parent.depth + 1 >= want.chain:
        return f"the chain has {parent.depth + 1} backups"
    known = {one.name: one for one in parent.disks}
    now = {one.name: one for one in disks}
    if other := sorted(known.keys() ^ now.keys()):
        return f"only one of both backups has the disk {other[0]}"
    differences = (_difference(known[name], disk) for name, disk in now.items())
    if why := next(filter(None, differences), ""):
        return why
    try:
        files.chain(parent.id)
    except VirtbusError as error:
        return str(error)
    return ""


def _difference(known: BackupDisk, now: BackupDisk) -> str:
    if known.volume_uid != now.volume_uid:
        return f"the disk {now.name} is another volume"
    if known.below != now.below:
        return f"the disk {now.name} has other layers since a snapshot or a restore"
    if known.virtual_size_bytes > now.virtual_size_bytes:
        return f"the disk {now.name} was larger before"
    return ""
