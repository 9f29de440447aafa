"""Makes, copies and removes the data of volumes: `<disks>/volumes/<folder>/disk.qcow2`.

Volumes of other pools are at `<disks>/pools/<pool>/<folder>/disk.qcow2` (ADR 0060). The file of a
shared volume is `disk.raw` (ADR 0086): only its guests read it. `<folder>` is `VolumeRef.folder`.
All folders are below the directory of the disks, because the service of imaged mounts each of its
directories separately, and no rename crosses a mount. Only an explicit release removes a folder
with a disk.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from virtbus.imaged.core import overlay
from virtbus.imaged.core.overlay import HEAD_BYTES, Layout, read_overlay
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import (
    NOTE_SUFFIX,
    SUFFIX,
    DiskFolders,
    remove_second_link,
    write_disk,
    write_layout,
)
from virtbus.imaged.edge.export_files import NEW
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.node_rpc import HeldResources, HeldVolume
from virtbus.schemas.pool import LOCAL
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import decode, encode_json, validate

FOLDER, POOLS = "volumes", "pools"
DISK = "disk"
SHARED = "disk.raw"
PART = "part"
"""The name of a disk that is being copied. The rename to the final name is the last step (ADR
0053)."""
RECORD = "record.json"
"""The host's copy of the volume's identity, from which a lost bus is rebuilt."""
MAX_NOTE_BYTES = 16 * 1024
PAGE = 200
"""Number of volumes in one answer."""
_NAME = r"[a-z0-9][a-z0-9-]{0,62}"
_VOLUME = re.compile(rf"^{_NAME}\.{_NAME}\.[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$")


class VolumeNote(LenientModel):
    """The file `record.json` next to a volume's data: the host's own copy of its identity.

    `holder` is the last VM whose disks were made with the volume, under `epoch`; empty before the
    first VM. `digest` is that of the image that the disk rests on.
    """

    ref: VolumeRef
    holder: Uid | Literal[""] = ""
    epoch: int = 0
    digest: str = ""
    operation: Uid | Literal[""] = ""
    """The operation that filled the volume last; empty once a VM has used it."""


class VolumeFolders(DiskFolders):
    """The folders of the volumes in one pool. All methods block on the disk."""

    _folder = _VOLUME

    def __init__(self, disks: Path, pool: str = LOCAL) -> None:
        # the root of `local` exists only while it has volumes; operators make the roots of other
        # pools
        self.root = disks / FOLDER if pool == LOCAL else disks / POOLS / pool
        self._ours = pool == LOCAL
        self._notes = os.geteuid() != 0

    @contextlib.contextmanager
    def _open_root(self) -> Iterator[int]:
        with openat2.opened_directory(self.root) as root:
            yield root

    def _folders(self) -> list[str]:
        try:
            return super()._folders()
        except FileNotFoundError:
            return []

    def remove(self, folder: str) -> bool:
        """Remove a volume; return False if there was none; errors as `DiskFolders.remove`."""
        found = super().remove(folder)
        if self._ours:
            with contextlib.suppress(OSError):  # other volumes may be in it
                self.root.rmdir()
        return found

    def names(self) -> list[str]:
        return [one for one in self._folders() if self._folder.match(one)]

    def size_bytes(self, folder: str) -> int | None:
        """Return the size that the guest sees; None without a readable disk."""
        try:
            found = self.read(folder, DISK)
            return found.virtual_size_bytes if found is not None else self.shared_bytes(folder)
        except VirtbusError:
            return None

    def shared_bytes(self, folder: str) -> int | None:
        """Return the size of a shared volume; None if it has no file yet.

        Raises:
            VirtbusError: 503 `store_error`.
        """
        try:
            with self._open(folder) as directory:
                remove_second_link(SHARED, directory)
                return os.stat(SHARED, dir_fd=directory, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error) from error

    def make_shared(self, folder: str, size_bytes: int) -> int:
        """Write the empty file of a shared volume, in whole sectors; return its size.

        Raises:
            VirtbusError: 503 `disk_full`, `store_error`.
        """
        size_bytes = -(-size_bytes // 512) * 512
        try:
            with self._open(folder) as directory:
                write_disk(SHARED, Layout((), size_bytes), directory)
                os.fsync(directory)
        except OSError as error:
            raise store_error(error) from error
        return size_bytes

    def note(self, note: VolumeNote) -> None:
        """Write `record.json` of a volume if its content changes; make the folder if needed.

        Raises:
            VirtbusError: 503 `disk_full`, `store_error`.
        """
        body = encode_json(note)
        try:
            folder = self._checked(note.ref.folder)
            if self._ours:
                openat2.make_passable(self.root)
            with self._open_root() as root:
                os.close(openat2.open_directory(folder, root, openat2.PASSABLE))
                os.fsync(root)
            with self._open(folder) as directory:
                if _small(RECORD, directory) != body:
                    openat2.replace(RECORD, body, directory)
                    os.fsync(directory)
        except OSError as error:
            raise store_error(error) from error

    def begin_copy(self, ref: VolumeRef, size_bytes: int, operation: str) -> ExportPart:
        """Return a new, empty disk of `size_bytes`, which no VM sees before `publish_copy`.

        Raises:
            VirtbusError: 503 `disk_full`, `store_error`.
        """
        self.note(VolumeNote.model_validate({"ref": ref, "operation": operation}))
        try:
            with self._open(ref.folder) as directory:
                openat2.remove(PART, directory)
                part = ExportPart(openat2.open_file(PART, directory, NEW))
            try:
                write_layout(overlay.build(size_bytes), part.descriptor)
            except BaseException:
                part.close()
                raise
        except OSError as error:
            raise store_error(error) from error
        return part

    def publish_copy(self, folder: str, part: ExportPart, size_bytes: int) -> None:
        """Give a finished part its final name, durable on return.

        Raises:
            VirtbusError: 409 `disk_damaged`, 503 `disk_full`, `store_error`.
        """
        try:
            os.fsync(part.descriptor)
            made = read_overlay(os.pread(part.descriptor, HEAD_BYTES, 0))
            if made.backing_path or made.virtual_size_bytes < size_bytes:
                message = f"the copy of {folder} has a wrong size or backing file; it is not used"
                raise VirtbusError(Code.CONFLICT, "disk_damaged", message)
            with self._open(folder) as directory:
                if self._notes:
                    note = encode_json(dataclasses.asdict(made))
                    openat2.replace(DISK + NOTE_SUFFIX, note, directory)
                os.rename(PART, DISK + SUFFIX, src_dir_fd=directory, dst_dir_fd=directory)
                os.fsync(directory)
        except OSError as error:
            raise store_error(error) from error

    def filled_by(self, folder: str) -> str:
        """Return the operation that filled a volume; empty if unknown, or after a VM's use."""
        try:
            with self._open(folder) as directory:
                return validate(VolumeNote, decode(_small(RECORD, directory))).operation
        except (OSError, VirtbusError):
            return ""

    def has_other(self, folder: str, operation: str) -> bool:
        """Return True if a volume has a disk that another operation wrote or that a VM used."""
        try:
            with self._open(folder) as directory:
                whole = DISK + SUFFIX in openat2.names(directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error) from error
        return whole and self.filled_by(folder) != operation

    def drop_copy(self, folder: str) -> None:
        """Remove the remains of an unfinished copy. A volume keeps a complete disk."""
        try:
            with self._open(folder) as directory:
                openat2.remove(PART, directory)
                whole = DISK + SUFFIX in openat2.names(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error(error) from error
        if not whole:
            self.remove(folder)

    def page(self, after: str) -> HeldResources:
        names = sorted(one for one in self.names() if one > after)
        found = tuple(self._held(one) for one in names[:PAGE])
        return HeldResources(volumes=found, more=len(names) > PAGE)

    def _held(self, folder: str) -> HeldVolume:
        try:
            with self._open(folder) as directory:
                note = validate(VolumeNote, decode(_small(RECORD, directory)))
        except (OSError, VirtbusError):
            return HeldVolume(folder=folder)
        return HeldVolume(folder=folder, ref=note.ref, holder=note.holder)

    def refuse_used(self, folder: str) -> None:
        """Raise 409 `volume_in_use` if a pin shows that a VM of this host has the disk's file."""
        names = 1
        for file in (DISK + SUFFIX, SHARED):
            try:
                with self._open(folder) as directory:
                    found = os.stat(file, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise store_error(error) from error
            names = max(names, found.st_nlink)
        if names > 1:
            message = (
                f"a VM of this node still has the volume {folder}; its agent gives it up after a "
                "detach or the delete of that VM"
            )
            raise VirtbusError(Code.CONFLICT, "volume_in_use", message, after_ms=5000)


def _small(name: str, directory: int) -> bytes:
    try:
        return openat2.read_small(name, directory, MAX_NOTE_BYTES)
    except FileNotFoundError:
        return b""
