"""Stages the files that the QEMU of a guest writes: `disks/backups/<id>/<disk>.qcow2` (ADR 0068).

The files are on the disk of `state_dir`, so that no guest waits for the backup directory.
"""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from virtbus.imaged.core.overlay import HEAD_BYTES, build, read_overlay
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import SUFFIX, write_layout
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.imaged.edge.partial_download import translated
from virtbus.schemas.backup import BackupDisk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid

STAGING = "backups"
_ROOT = threading.Lock()
"""Held while the root is made with a first folder in it, or removed."""
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


class BackupStaging:
    """The staged files of backups."""

    def __init__(self, disks: Path) -> None:
        self.root = disks / STAGING

    def make(self, backup: str, disks: Collection[BackupDisk]) -> None:
        """Write an empty qcow2 file for each disk. The QEMU of the guest fills the files."""
        self.remove(backup)
        with translated():
            name = check_uid(backup)
            with _ROOT:
                openat2.make_passable(self.root)
                with openat2.opened_directory(self.root) as root:
                    os.close(openat2.open_directory(name, root, openat2.PASSABLE))
            with (
                openat2.opened_directory(self.root) as root,
                openat2.opened_directory(name, root) as folder,
            ):
                for disk in disks:
                    _write_empty(disk, folder)
                os.fsync(folder)

    def opened(self, backup: str, disk: str) -> ExportPart:
        """Open a file that QEMU has written; the caller closes it."""
        with (
            translated(),
            openat2.opened_directory(self.root) as root,
            openat2.opened_directory(check_uid(backup), root) as folder,
        ):
            return ExportPart(openat2.open_file(disk + SUFFIX, folder))

    def remove(self, backup: str) -> None:
        """Remove the files that QEMU has written, and the root if it is empty."""
        with existing(self.root) as root:
            if root is not None:
                remove_folder(check_uid(backup), root)
        with _ROOT, contextlib.suppress(OSError):  # other backups may have files in it
            self.root.rmdir()


@contextlib.contextmanager
def existing(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of a directory, None if it does not exist."""
    with translated():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def check_file(descriptor: int, of: BackupDisk) -> None:
    """Raise 409 `disk_damaged` if a qcow2 file has a backing file, or not the disk's size."""
    found = read_overlay(os.pread(descriptor, HEAD_BYTES, 0))
    if found.backing_path or found.virtual_size_bytes != of.virtual_size_bytes:
        message = f"the file of the disk {of.name} is not the one that virtbus made"
        raise VirtbusError(Code.CONFLICT, "disk_damaged", message)


def _write_empty(disk: BackupDisk, folder: int) -> None:
    descriptor = openat2.open_file(disk.name + SUFFIX, folder, NEW)
    try:
        write_layout(build(disk.virtual_size_bytes), descriptor)
    finally:
        os.close(descriptor)


def remove_folder(name: str, directory: int) -> None:
    """Remove a folder with its files; no error if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        with openat2.opened_directory(name, directory) as folder:
            for one in openat2.names(folder):
                openat2.remove(one, folder)
        os.rmdir(name, dir_fd=directory)
