"""Moves disks that no record accounts for into the quarantine, and out of it (ADR 0033).

An entry is a VM's renamed directory of disks: `<disks>/quarantine/<entry>/`. Its manifest has the
VM, the time and the reason. The quarantine is below the directory of the disks, because a rename
does not cross mounts, and the service of imaged mounts each of its directories separately.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import NOTE_SUFFIX, DiskFolders, FoundDisk
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.quarantine import ENTRY, QuarantineEntry, QuarantineRequest
from virtbus.schemas.wire import encode, read

FOLDER = "quarantine"
MANIFEST = "_manifest.json"
"""File name of the manifest. No volume can have this name."""
_BLOCK_BYTES = 512


class QuarantineManifest(LenientModel):
    """The metadata of an entry.

    `keep` has the reason and the VM's record. `since_ns` is Unix time.
    """

    uid: str
    epoch: int
    keep: QuarantineRequest
    since_ns: int


class QuarantineFiles:
    """Moves disks into the quarantine and out of it. All methods block on the disk.

    The caller must serialize calls for one uid.
    """

    def __init__(self, files: DiskFolders) -> None:
        self._files = files
        self.root = files.root / FOLDER
        """The folder of all entries. It exists only while there are entries."""

    def keep(self, uid: str, manifest: QuarantineManifest) -> str:
        """Move a VM's disks into the quarantine; return the entry's name, empty if none is made.

        Disks that were never written to are removed. A repeat after a crash returns the entry of
        the first call.

        Raises:
            VirtbusError: 503 `disk_full`, `store_error`.
        """
        folder = self._files.root / check_uid(uid)
        try:
            if not folder.is_dir():
                return self._kept(uid, manifest.epoch)
            if not self._files.written(uid):
                self._files.remove(uid)
                return ""
            with openat2.opened_directory(folder) as there:
                openat2.replace(MANIFEST, encode(manifest), there)
            openat2.make_passable(self.root)
            entry = self._free(uid)
            folder.rename(self.root / entry)
            self._sync()
        except OSError as error:
            raise store_error(error) from error
        return entry

    def _kept(self, uid: str, epoch: int) -> str:
        for entry in reversed(self._names()):
            manifest = self._manifest(entry) if entry.partition(".")[0] == uid else None
            if manifest is not None and manifest.epoch == epoch:
                return entry
        return ""

    def _free(self, uid: str) -> str:
        taken = {one.name for one in self.root.iterdir()}
        names = itertools.chain([uid], (f"{uid}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def restore(self, entry: str, uid: str, instead: QuarantineManifest) -> None:
        """Make the disks of an entry the disks of the VM `uid`.

        The VM's current disks become an entry with the manifest `instead`, if they were written to.

        Raises:
            VirtbusError: 404 `no_entry`. 503 `disk_full`, `store_error`.
        """
        folder = self._folder(entry)
        try:
            self.keep(uid, instead)
            folder.rename(self._files.root / check_uid(uid))
            with contextlib.suppress(FileNotFoundError):
                (self._files.root / uid / MANIFEST).unlink()
            self._sync()
            self._tidy()
        except OSError as error:
            raise store_error(error) from error

    def purge(self, entry: str) -> None:
        """Remove an entry permanently.

        Raises:
            VirtbusError: 404 `no_entry`, 503 `store_error`.
        """
        try:
            shutil.rmtree(self._folder(entry))
            self._tidy()
        except OSError as error:
            raise store_error(error) from error

    def entries(self) -> list[QuarantineEntry]:
        """Return all entries, sorted by name, without entries that are removed meanwhile.

        Raises:
            VirtbusError: 503 `store_error`.
        """
        found = []
        for entry in self._names():
            try:
                found.append(self.get(entry))
            except VirtbusError as error:
                if error.code != Code.NOT_FOUND:
                    raise
        return found

    def get(self, entry: str) -> QuarantineEntry:
        """Return one entry, with facts from its name and files if its manifest cannot be read.

        Raises:
            VirtbusError: 404 `no_entry`. 503 `store_error`.
        """
        try:
            found = self._read(entry)
            self._folder(entry)  # it may have been purged meanwhile
        except FileNotFoundError:
            raise _no_entry(entry) from None
        except OSError as error:
            raise store_error(error) from error
        return found

    def _read(self, entry: str) -> QuarantineEntry:
        folder, manifest = self._folder(entry), self._manifest(entry)
        keep = (
            manifest.keep
            if manifest is not None
            else QuarantineRequest(why="its manifest cannot be read")
        )
        record = keep.record
        disks = _disks(folder)
        return QuarantineEntry(
            entry=entry,
            uid=entry.partition(".")[0],
            namespace=record.namespace if record else "",
            name=record.name if record else "",
            epoch=manifest.epoch if manifest else 0,
            adoptable=record is not None,
            disks=tuple(disk.stem for disk in disks),
            bytes=sum(disk.lstat().st_blocks for disk in disks) * _BLOCK_BYTES,
            digests=tuple(
                sorted({digest for disk in self._found(entry) if (digest := disk.digest)})
            ),
            why=keep.why,
            since_ns=manifest.since_ns if manifest else 0,
        )

    def manifest(self, entry: str) -> QuarantineManifest | None:
        self._folder(entry)
        return self._manifest(entry)

    def find(self) -> Iterator[FoundDisk]:
        """Yield the disks in quarantine; their images count as used."""
        for entry in self._names():
            yield from self._found(entry)

    def _found(self, entry: str) -> Iterator[FoundDisk]:
        uid = entry.partition(".")[0]
        for disk in _disks(self.root / entry):
            yield FoundDisk(uid, str(disk), self._files.overlay_in(self.root / entry, disk.stem))

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(one.name for one in self.root.iterdir() if ENTRY.fullmatch(one.name))
        return []

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # other entries exist
            self.root.rmdir()

    def _folder(self, entry: str) -> Path:
        folder = self.root / entry
        if not ENTRY.fullmatch(entry) or folder.is_symlink() or not folder.is_dir():
            raise _no_entry(entry)
        return folder

    def _manifest(self, entry: str) -> QuarantineManifest | None:
        try:
            return read(QuarantineManifest, (self.root / entry / MANIFEST).read_bytes())
        except (OSError, VirtbusError):
            return None

    def _sync(self) -> None:
        for folder in (self.root, self._files.root):
            with openat2.opened_directory(folder) as descriptor:
                os.fsync(descriptor)


def _no_entry(entry: str) -> VirtbusError:
    message = f"there is no {entry} in quarantine here; list what there is"
    return VirtbusError(Code.NOT_FOUND, "no_entry", message)


def _disks(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.suffix != NOTE_SUFFIX)
    except (FileNotFoundError, NotADirectoryError):
        return []
