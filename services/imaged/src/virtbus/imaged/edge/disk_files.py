"""Makes, reads and removes the disks of VMs: `<root>/<uid>/<volume>.qcow2`."""

import contextlib
import dataclasses
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from virtbus.bus.runtime.image_locks import take
from virtbus.imaged.core.growth import grown
from virtbus.imaged.core.overlay import (
    HEAD_BYTES,
    Layout,
    Overlay,
    length_bytes,
    read_overlay,
)
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.layer import LAYERS
from virtbus.schemas.wire import decode, encode_json

SUFFIX = ".qcow2"
TEMPORARY = ".tmp-"
NOTE_SUFFIX = ".json"
"""Suffix of the note next to each disk, which has the disk's `Overlay`. libvirt gives a running
VM's disk to QEMU's user. So an imaged that is not root cannot read the disk's header, and reads the
note instead. An imaged that is root writes no notes."""
_UID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


@dataclass(frozen=True, slots=True)
class FoundDisk:
    """A disk, another file in a folder of disks (temporary or foreign), or an empty folder.

    `file` is the path of the file, empty for a folder. `overlay` is None if the file is not a disk
    of virtbus, or if its header and its note are unreadable.
    """

    uid: str
    file: str
    overlay: Overlay | None

    @property
    def is_unknown(self) -> bool:
        """Return True for a disk whose `overlay` is unknown: it may rest on any image or layer."""
        name = Path(self.file).name
        return self.overlay is None and name.endswith(SUFFIX) and not name.startswith(".")

    @property
    def digest(self) -> str:
        """Return the digest of the image directly below the disk; empty if there is none.

        Also empty without `overlay`, and for a disk on a layer: the disk's lowest layer names the
        image.
        """
        path = self.overlay.backing_path if self.overlay is not None else ""
        return f"sha256:{Path(path).name}" if path and not self.layer else ""

    @property
    def layer(self) -> str:
        path = Path(self.overlay.backing_path if self.overlay is not None else "")
        return path.name if path.parent.name == LAYERS else ""


class DiskFolders:
    """Makes, reads and removes disk files. All methods block on the disk.

    A folder belongs to a VM, and its name is the VM's uid.
    """

    _folder = _UID

    def __init__(self, root: Path) -> None:
        openat2.make_passable(root)
        self.root = root
        self._notes = os.geteuid() != 0
        self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root_fd)

    def path(self, uid: str, volume: str) -> Path:
        """Return the path of a volume's disk. The caller has checked `uid` and `volume`."""
        return self.root / uid / f"{volume}{SUFFIX}"

    def read(self, uid: str, volume: str) -> Overlay | None:
        """Return the overlay of a volume's disk, None if the disk does not exist.

        Raises:
            VirtbusError: 409 `disk_damaged`, 503 `store_error`.
        """
        try:
            with self._open(uid) as directory:
                remove_second_link(volume + SUFFIX, directory)
                return read_disk(volume, directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error) from error

    def written(self, uid: str) -> bool:
        """Return True if any disk of the VM may have been written to since `make`.

        QEMU's first write extends the file, so its length decides. An unreadable disk and a disk on
        a layer count as written.
        """
        for found in self.find(uid):
            if not found.file:
                continue
            made = found.overlay
            if (
                made is None
                or found.layer
                or Path(found.file).lstat().st_size != length_bytes(made)
            ):
                return True
        return False

    def overlay_in(self, folder: Path, volume: str) -> Overlay | None:
        """Return the overlay of a disk in `folder`; None if `read_disk` raises an error."""
        try:
            with openat2.opened_directory(folder) as directory:
                return read_disk(volume, directory)
        except (OSError, VirtbusError):
            return None

    def _checked(self, folder: str) -> str:
        if self._folder.fullmatch(folder) is None:
            msg = f"{folder!r} is no folder of disks"
            raise ValueError(msg)
        return folder

    @contextlib.contextmanager
    def _open_root(self) -> Iterator[int]:
        yield self._root_fd

    @contextlib.contextmanager
    def _open(self, uid: str) -> Iterator[int]:
        with self._open_root() as root, openat2.opened_directory(self._checked(uid), root) as there:
            yield there

    def make(self, uid: str, volume: str, layout: Layout, overlay: Overlay) -> None:
        """Write a disk atomically: temporary file, fsync, link. Never replaces a disk.

        Raises:
            VirtbusError: 503 `disk_full`, `store_error`.
        """
        try:
            with self._open_root() as root:
                os.close(openat2.open_directory(self._checked(uid), root, openat2.PASSABLE))
            with self._open(uid) as directory:
                if self._notes:
                    note = encode_json(dataclasses.asdict(overlay))
                    openat2.replace(volume + NOTE_SUFFIX, note, directory)
                write_disk(volume + SUFFIX, layout, directory)
        except OSError as error:
            raise store_error(error) from error

    def replace(self, uid: str, volume: str, layout: Layout, overlay: Overlay) -> None:
        """Write a disk as `make` does, or replace it with another medium of a CD-ROM drive."""
        try:
            with self._open_root() as root:
                os.close(openat2.open_directory(self._checked(uid), root, openat2.PASSABLE))
            with self._open(uid) as directory:
                write_disk(volume + SUFFIX, layout, directory, instead=True)
                if self._notes:
                    note = encode_json(dataclasses.asdict(overlay))
                    openat2.replace(volume + NOTE_SUFFIX, note, directory)
        except OSError as error:
            raise store_error(error) from error

    def grow(self, folder: str, volume: str, size_bytes: int) -> None:
        """Make a disk larger. No effect while a QEMU uses the disk: QEMU or a later call grows it.

        Raises:
            VirtbusError: 409 `disk_damaged`, 422 `cannot_grow`, 503 `store_error`.
        """
        try:
            with self._open(folder) as directory:
                self._grow(volume, directory, size_bytes)
        except PermissionError:
            return  # libvirt gave the disk to QEMU's user, so a guest runs
        except OSError as error:
            raise store_error(error) from error

    def renew_note(self, folder: str, volume: str) -> None:
        """Correct the note of a disk whose header can be read. A missing note is not written.

        A crash after a merge of the disk's layers, or in `replace` or `grow`, leaves an old note.
        """
        if not self._notes:
            return
        with contextlib.suppress(OSError, VirtbusError), self._open(folder) as directory:
            made = read_overlay(openat2.read_small(volume + SUFFIX, directory, HEAD_BYTES))
            note = encode_json(dataclasses.asdict(made))
            if openat2.read_small(volume + NOTE_SUFFIX, directory, HEAD_BYTES) != note:
                openat2.replace(volume + NOTE_SUFFIX, note, directory)

    def note_merged(self, folder: str, volume: str, inode: int, lowest: Overlay) -> None:
        """Write the note of a disk that a merge of its layers has put directly on its image.

        `lowest` is the overlay of the former lowest layer. The guest runs, so the header may be
        unreadable. No effect if the disk's inode number is not `inode`: then a snapshot has
        replaced the file.

        Raises:
            VirtbusError: 409 `disk_damaged`, 503 `store_error`.
        """
        if not self._notes:
            return
        try:
            with self._open(folder) as directory:
                found = os.stat(volume + SUFFIX, dir_fd=directory, follow_symlinks=False)
                if found.st_ino == inode:
                    below = lowest.backing_path, lowest.backing_format
                    made = read_disk(volume, directory)
                    made = Overlay(made.virtual_size_bytes, *below)
                    note = encode_json(dataclasses.asdict(made))
                    openat2.replace(volume + NOTE_SUFFIX, note, directory)
        except OSError as error:
            raise store_error(error) from error

    def _grow(self, volume: str, directory: int, size_bytes: int) -> None:
        descriptor = openat2.open_file(volume + SUFFIX, directory, os.O_RDWR)
        try:
            if not take(descriptor):
                return
            offset, data = grown(os.pread(descriptor, HEAD_BYTES, 0), size_bytes)
            os.pwrite(descriptor, data, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self._notes:
            made = dataclasses.replace(read_disk(volume, directory), virtual_size_bytes=size_bytes)
            openat2.replace(volume + NOTE_SUFFIX, encode_json(dataclasses.asdict(made)), directory)

    def remove(self, uid: str) -> bool:
        """Remove the folder of a VM with all its disks; return False if there was no folder.

        Raises:
            VirtbusError: 503 `store_error`.
        """
        try:
            with self._open_root() as root, self._open(uid) as directory:
                for name in openat2.names(directory):
                    openat2.remove(name, directory)
                os.rmdir(uid, dir_fd=root)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error) from error
        return True

    def find(self, uid: str | None = None) -> Iterator[FoundDisk]:
        for name in [uid] if uid else self._folders():
            path = self.root / name
            if not self._folder.fullmatch(name) or path.is_symlink() or not path.is_dir():
                continue
            try:
                files = sorted(file for file in path.iterdir() if file.suffix != NOTE_SUFFIX)
            except FileNotFoundError:  # removed, or moved to the quarantine, just now
                continue
            if not files:
                yield FoundDisk(name, "", None)  # an empty folder must be released, too
            for file in files:
                yield FoundDisk(name, str(file), self._overlay_of(name, file))

    def _folders(self) -> list[str]:
        with self._open_root() as root:
            return openat2.names(root)

    def _overlay_of(self, uid: str, file: Path) -> Overlay | None:
        if not file.name.endswith(SUFFIX) or file.name.startswith("."):
            return None
        try:
            return self.read(uid, file.name.removesuffix(SUFFIX))
        except VirtbusError:
            return None


def remove_second_link(file: str, directory: int) -> None:
    """Remove the second link to a disk that a crash in `write_disk` can leave.

    The agent refuses a disk with two links. A read-only file system is no error, because unlink
    fails there even without a link.
    """
    try:
        openat2.remove(TEMPORARY + file, directory)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def read_disk(volume: str, directory: int) -> Overlay:
    """Return the overlay of a disk, from its note if imaged has no permission to open the disk."""
    try:
        return read_overlay(openat2.read_small(volume + SUFFIX, directory, HEAD_BYTES))
    except PermissionError as unreadable:
        try:
            note = decode(openat2.read_small(volume + NOTE_SUFFIX, directory, HEAD_BYTES))
            return Overlay(**note)
        except (OSError, VirtbusError, TypeError):
            raise unreadable from None


def write_layout(layout: Layout, descriptor: int) -> None:
    """Write a new disk to an empty file."""
    for offset, data in layout.pieces:
        os.pwrite(descriptor, data, offset)
    os.ftruncate(descriptor, layout.length_bytes)


def write_disk(final: str, layout: Layout, directory: int, *, instead: bool = False) -> None:
    """Write a disk under its final name. An existing disk is replaced only with `instead`."""
    temporary = f"{TEMPORARY}{final}"
    # Removed, not truncated: after a crash this name can be a second link to the disk.
    openat2.remove(temporary, directory)
    descriptor = openat2.open_file(temporary, directory, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_layout(layout, descriptor)
        os.fsync(descriptor)
        if instead:
            os.rename(temporary, final, src_dir_fd=directory, dst_dir_fd=directory)
            return
        # link(2), unlike rename(2), cannot replace an existing disk
        with contextlib.suppress(FileExistsError):
            os.link(temporary, final, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(descriptor)
        openat2.remove(temporary, directory)
