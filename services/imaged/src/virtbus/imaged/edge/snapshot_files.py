"""Keeps the disks of snapshots: `<disks>/snapshots/<folder>/<disk>.qcow2` and `record.json`.

`<folder>` is `SnapshotRef.folder`. The disks in a folder are frozen: no program writes to them. A
snapshot is complete if it has `record.json`. A restore first writes its journal, `replacing.json`.
From then on, the restore can only be completed, even after a crash. A snapshot whose disks become
layers begins with the journal `layering.json`. At the end, `record.json` replaces the journal (ADR
0061).
"""

import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import Literal

from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import NOTE_SUFFIX, SUFFIX, read_disk
from virtbus.imaged.edge.layer_files import LayerFolder
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.volume_files import DISK, VolumeFolders
from virtbus.imaged.edge.volume_files import FOLDER as VOLUMES
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.layer import STAGED, layer_name
from virtbus.schemas.model import LenientModel
from virtbus.schemas.node_rpc import HeldResources, HeldSnapshot
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef
from virtbus.schemas.wire import decode, encode_json, validate

log = logging.getLogger(__name__)

FOLDER = "snapshots"
RECORD = "record.json"
REPLACING = "replacing.json"
LAYERING = "layering.json"
PAGE = 200
MAX_NOTE_BYTES = 1024 * 1024
_PRIVATE = 0o700
_FROZEN = 0o400


class SnapshotNote(LenientModel):
    """The host's description of a snapshot. `uid` and `name` denote its VM or volume."""

    ref: SnapshotRef
    resource: Literal["vm", "volume"]
    uid: Uid
    name: Id
    disks: tuple[SnapshotDisk, ...]
    size_bytes: int = 0
    layered: bool = False
    """True if the snapshot's disks are layers, whose names begin with the snapshot's uid."""
    live: bool = False
    """True if a guest used the disks when the journal was written."""


class SnapshotFolders(VolumeFolders):
    """The folders of snapshots, which have the same form as those of volumes."""

    def __init__(self, disks: Path) -> None:
        super().__init__(disks)
        self.root = disks / FOLDER
        self._disks = disks
        self.layers = LayerFolder(disks)

    # --- read -----------------------------------------------------------------------------
    def complete(self, folder: str) -> SnapshotNote | None:
        return self._noted(folder, RECORD)

    def frozen_path(self, note: SnapshotNote, disk: str) -> Path:
        if note.layered:
            return self.layers.path(note.ref.uid, disk)
        return self.path(note.ref.folder, disk)

    def frozen(self, note: SnapshotNote, disk: str) -> Overlay | None:
        if note.layered:
            return self.layers.read(layer_name(note.ref.uid, disk))
        return self.read(note.ref.folder, disk)

    def notes(self) -> list[SnapshotNote]:
        """Return the descriptions of all snapshots, also those in journals of layered snapshots.

        Raises:
            VirtbusError: a description cannot be read (503 `store_error`), or is damaged.
        """
        found = []
        for folder in filter(self._folder.match, self._folders()):
            notes = (self._noted(folder, name) for name in (LAYERING, RECORD))
            found += [note for note in notes if note is not None]
        return found

    def _noted(self, folder: str, name: str) -> SnapshotNote | None:
        try:
            with self._open(folder) as directory:
                return validate(
                    SnapshotNote, decode(openat2.read_small(name, directory, MAX_NOTE_BYTES))
                )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error) from error

    def page(self, after: str) -> HeldResources:
        names = sorted(one for one in self._folders() if one > after and self._folder.match(one))
        found = []
        for folder in names[:PAGE]:
            try:
                note = self.complete(folder)
            except VirtbusError:
                note = None
            fields = {} if note is None else note.model_dump(exclude={"disks"})
            found.append(HeldSnapshot(folder=folder, **fields))
        return HeldResources(snapshots=tuple(found), more=len(names) > PAGE)

    # --- write ----------------------------------------------------------------------------
    def begin(self, folder: str) -> None:
        """Make an empty folder; an existing folder is emptied.

        Raises 503 `store_error`, `disk_full`.
        """
        self.remove(folder)
        try:
            openat2.make_passable(self.root)
            with self._open_root() as root:
                os.close(openat2.open_directory(self._checked(folder), root, _PRIVATE))
                os.fsync(root)
        except OSError as error:
            raise store_error(error) from error

    def remove(self, folder: str) -> bool:
        """Remove a snapshot, `record.json` first.

        So an interrupted removal leaves an incomplete snapshot.

        Errors as `DiskFolders.remove`.
        """
        try:
            with self._open(folder) as directory:
                for name in (RECORD, REPLACING, LAYERING):
                    openat2.remove(name, directory)
                os.fsync(directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error) from error
        return super().remove(folder)

    def new_disk(self, folder: str, disk: str) -> int:
        with self._open(folder) as directory:
            return _new(f"{STAGED}{disk}{SUFFIX}", directory)

    def freeze(self, folder: str, disk: str, target: int) -> None:
        """Give the finished file of a disk its name. Afterwards no program writes to the file."""
        os.fchmod(target, _FROZEN)
        os.fsync(target)
        name = f"{disk}{SUFFIX}"
        with self._open(folder) as directory:
            os.rename(STAGED + name, name, src_dir_fd=directory, dst_dir_fd=directory)

    def keep(self, folder: str, disk: str, path: Path) -> None:
        """Give a disk a second name in the snapshot. A later rename replaces the first name."""
        with self._open(folder) as directory, openat2.opened_directory(path.parent) as there:
            os.link(
                path.name,
                f"{disk}{SUFFIX}",
                src_dir_fd=there,
                dst_dir_fd=directory,
                follow_symlinks=False,
            )

    def note_begun(self, note: SnapshotNote) -> None:
        """Write the journal of a restore, or of a layered snapshot, whose disks are all staged."""
        for folder in {self.place(note.uid, disk).parent for disk in note.disks}:
            with openat2.opened_directory(folder) as directory:
                os.fsync(directory)
        with self._open(note.ref.folder) as directory:
            os.fsync(directory)
            journal = LAYERING if note.layered else REPLACING
            openat2.replace(journal, encode_json(note), directory)
            os.fsync(directory)

    def publish(self, note: SnapshotNote) -> None:
        """Make a snapshot complete, durable on return; raises 503 `store_error`, `disk_full`."""
        try:
            with self._open(note.ref.folder) as directory:
                os.fsync(directory)
                openat2.replace(RECORD, encode_json(note), directory)
                os.fsync(directory)
                for journal in (REPLACING, LAYERING):
                    openat2.remove(journal, directory)
        except OSError as error:
            raise store_error(error) from error

    # --- restores -------------------------------------------------------------------------
    def place(self, uid: str, disk: SnapshotDisk) -> Path:
        """Return the path of a present disk, which a staged disk replaces."""
        if disk.ref is None:
            return self._disks / uid / f"{disk.name}{SUFFIX}"
        return VolumeFolders(self._disks).path(disk.ref.folder, DISK)

    def stage(self, uid: str, disk: SnapshotDisk) -> int:
        path = self.place(uid, disk)
        with openat2.opened_directory(path.parent) as directory:
            return _new(STAGED + path.name, directory)

    def unstage(self, uid: str, disks: tuple[SnapshotDisk, ...]) -> None:
        """Remove the staged files of an attempt that has no journal."""
        for disk in disks:
            path = self.place(uid, disk)
            with (
                contextlib.suppress(FileNotFoundError),
                openat2.opened_directory(path.parent) as directory,
            ):
                openat2.remove(STAGED + path.name, directory)

    def replace_disks(self, note: SnapshotNote) -> None:
        """Replace disks with their staged disks, and publish the note.

        May be repeated after a crash at any write. A disk whose VM or volume was removed meanwhile
        is skipped.

        Raises:
            VirtbusError: 503 `store_error`, `disk_full`.
        """
        try:
            for disk in note.disks:
                with contextlib.suppress(FileNotFoundError):
                    self.put(self.place(note.uid, disk))
        except OSError as error:
            raise store_error(error) from error
        self.publish(note)

    def put(self, path: Path) -> None:
        """Replace a disk with its staged disk, if there is one; renew the disk's metadata file."""
        with openat2.opened_directory(path.parent) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.rename(STAGED + path.name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
                os.fsync(directory)
            if self._notes:
                name = path.name.removesuffix(SUFFIX)
                made = encode_json(dataclasses.asdict(read_disk(name, directory)))
                openat2.replace(name + NOTE_SUFFIX, made, directory)

    def interrupted(self) -> list[SnapshotNote]:
        """Return the restores and snapshots that a crash ended after the write of their journal.

        Remove the remains of other interrupted attempts. No attempt may run meanwhile.
        """
        found = []
        for folder in filter(self._folder.match, self._folders()):
            try:
                note = self._noted(folder, REPLACING) or self._noted(folder, LAYERING)
                if note is not None:
                    found.append(note)
                elif self.complete(folder) is None:
                    self.remove(folder)
            except VirtbusError as error:
                log.error("snapshot %s is left: %s", folder, error, extra={"code": error.reason})
        places = {self.place(note.uid, disk) for note in found for disk in note.disks}
        kept = {path.with_name(STAGED + path.name) for path in places}
        for pattern in (f"*/{STAGED}*", f"{VOLUMES}/*/{STAGED}*"):
            for path in set(self._disks.glob(pattern)) - kept:
                with openat2.opened_directory(path.parent) as directory:
                    openat2.remove(path.name, directory)
        return found


def _new(name: str, directory: int) -> int:
    openat2.remove(name, directory)
    return openat2.open_file(name, directory, os.O_RDWR | os.O_CREAT | os.O_EXCL)
