"""Names disks' files in their VM's folder, where only the agent can change names.

Such a name is a hard link, called a *pin*. `disk_files` makes the pins.
"""

import os
from pathlib import Path

from virtbus.nodeagent.core.disk_sources import DISKS, disk_name, volume_place
from virtbus.schemas.vm import VmRecord

PINNED = "disk-"
"""`<state_dir>/vms/<uid>/disk-<volume>.qcow2`: a disk's pin."""
BACKUP_PIN = "backup-"
"""`backup-<id>.<volume>.qcow2`: the pin of a file to which QEMU writes a backup."""
LAYER_PIN = "layer-"
"""`layer-<volume>.<snapshot uid>.qcow2`: the pin of a disk's new file after a live snapshot."""


def drop_pins(state_dir: Path, record: VmRecord, *, running: bool) -> None:
    """Remove the pins of files that the VM's guest no longer uses.

    A left pin would make a volume unusable for its next VM. A pin that is the last name of a file
    stays. While a guest is `running`, pins of its disks' former files stay, because QEMU knows the
    files by these names.
    """
    disks = {*(one.name for one in record.spec.volumes), *record.volume_refs}
    own = disks - record.volume_refs.keys()
    found = disk_pins(state_dir / "vms" / record.uid)
    if all(name in own and not of_layer for _, name, of_layer in found):
        return  # most VMs: no need to examine their files
    places: dict[str, tuple[str, ...]] = {name: (record.uid, disk_name(name)) for name in disks}
    places |= {name: volume_place(ref) for name, ref in record.volume_refs.items()}
    current = {
        path
        for path, name, _ in found
        if name in disks and same_file(path, state_dir.joinpath(DISKS, *places[name]))
    }
    used = {name for path, name, _ in found if path in current}
    for path, name, of_layer in found:
        # a drive may still have a former medium; `drop_media` removes its pin later
        former = running and name in used
        kept = path in current or former or (name in own and not of_layer)
        if not kept and path.lstat().st_nlink > 1:
            path.unlink(missing_ok=True)


def disk_pins(folder: Path) -> list[tuple[Path, str, bool]]:
    """Return the pins in a VM's folder, with their volumes, and True for a LAYER_PIN."""
    prefixes = ((PINNED, False), (LAYER_PIN, True))
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return [
        (path, disk_of(path, prefix), of_layer)
        for path in paths
        for prefix, of_layer in prefixes
        if path.name.startswith(prefix)
    ]


def disk_of(path: Path, prefix: str) -> str:
    """Return a pin's text up to its first dot: a disk's name, or a backup's id."""
    return path.name.removeprefix(prefix).partition(".")[0]


def is_file(path: Path, found: os.stat_result) -> bool:
    """Return True if a path is a name of the file `found`."""
    try:
        return os.path.samestat(path.lstat(), found)
    except FileNotFoundError:
        return False


def same_file(path: Path, other: Path) -> bool:
    """Return True if two paths are names of one file."""
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False
