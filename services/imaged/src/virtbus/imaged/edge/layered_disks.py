"""Changes the files of disks for snapshots whose disks become layers (ADR 0061).

All functions block on the disk.
"""

import contextlib
import os
from pathlib import Path

from virtbus.bus.runtime.image_locks import locked
from virtbus.imaged.core import overlay
from virtbus.imaged.core.overlay import HEAD_BYTES, length_bytes, read_overlay
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import SUFFIX, write_layout
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.snapshot_files import SnapshotFolders, SnapshotNote
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.layer import STAGED, layer_name
from virtbus.schemas.snapshot import SnapshotDisk


def stage_on_layer(
    files: SnapshotFolders, uid: str, disk: SnapshotDisk, layer: Path, size_bytes: int
) -> None:
    """Write a disk that rests on a layer, next to the disk to be replaced; durable on return."""
    target = files.stage(uid, disk)
    try:
        layout = overlay.build(size_bytes, str(layer), ImageFormat.QCOW2)
        write_layout(layout, target)
        os.fsync(target)
    finally:
        os.close(target)


def freeze_layers(files: SnapshotFolders, note: SnapshotNote) -> None:
    """Turn the disks into layers, put the staged disks in their places, and publish the snapshot.

    May be repeated after a crash at any write. A disk that was removed meanwhile is skipped.

    Raises:
        VirtbusError: 503 `store_error`, `disk_full`.
    """
    try:
        for disk in note.disks:
            path = files.place(note.uid, disk)
            with (
                contextlib.suppress(FileNotFoundError),
                openat2.opened_directory(path.parent) as folder,
            ):
                if STAGED + path.name in openat2.names(folder):
                    name = layer_name(note.ref.uid, disk.name)
                    files.layers.take(path.name.removesuffix(SUFFIX), folder, name)
                    files.put(path)
    except OSError as error:
        raise store_error(error) from error
    files.publish(note)


def used_new(files: SnapshotFolders, note: SnapshotNote) -> bool | None:
    """Return True if a guest has written to a staged disk; None while a QEMU has any disk open.

    QEMU's first write extends a file, so the length shows a write (see `DiskFolders.written`).
    """
    written = False
    for disk in note.disks:
        path = files.place(note.uid, disk)
        try:
            with openat2.opened_directory(path.parent) as folder:
                with openat2.reading(path.name, folder) as present:
                    busy = locked(present)
                with openat2.reading(STAGED + path.name, folder) as staged:
                    if busy or locked(staged):
                        return None
                    made = read_overlay(os.pread(staged, HEAD_BYTES, 0))
                    written = written or os.fstat(staged).st_size != length_bytes(made)
        except PermissionError:
            return None  # libvirt gave the disk to QEMU's user, so a guest runs
        except FileNotFoundError:
            continue  # the VM was removed
    return written
