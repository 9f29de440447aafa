"""Keeps the layers of disks: `<disks>/layers/<snapshot uid>.<disk>.qcow2` (ADR 0061).

A layer is the file that a disk had when a snapshot froze the disk. Nothing writes to a layer. The
disk, the snapshot and clones rest on the layer. The name of a layer never changes, because the
headers of the files above contain it.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_files import NOTE_SUFFIX, SUFFIX, FoundDisk, read_disk
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.layer import LAYERS, MAX_LAYERS, layer_name
from virtbus.schemas.wire import encode_json

READABLE = 0o444
"""The mode of layers: QEMU's user must read them. Other users cannot list the folders above."""


class LayerFolder:
    """The layers of a node. All methods block on the disk."""

    def __init__(self, disks: Path) -> None:
        self.root = disks / LAYERS

    def path(self, snapshot_uid: str, disk: str) -> Path:
        return self.root / layer_name(snapshot_uid, disk)

    def opened(self) -> contextlib.AbstractContextManager[int]:
        openat2.make_passable(self.root)
        return openat2.opened_directory(self.root)

    def chain(self, top: Overlay) -> tuple[tuple[str, ...], Overlay]:
        """Return the names of the layers below a disk, from the top, and the lowest overlay.

        Raises:
            VirtbusError: 409 `layer_missing`, `disk_damaged`, `chain_too_long`. 503 `store_error`.
        """
        names: list[str] = []
        lowest = top
        while lowest.backing_path and Path(lowest.backing_path).parent == self.root:
            if len(names) == MAX_LAYERS:
                message = f"the disk rests on more than {MAX_LAYERS} layers; it is not used"
                raise VirtbusError(Code.CONFLICT, "chain_too_long", message)
            names.append(Path(lowest.backing_path).name)
            lowest = self.read(names[-1])
        return tuple(names), lowest

    def read(self, name: str) -> Overlay:
        """Return the overlay of a layer; raises VirtbusError as `chain`."""
        try:
            with openat2.opened_directory(self.root) as directory:
                return read_disk(name.removesuffix(SUFFIX), directory)
        except FileNotFoundError:
            message = f"the layer {name} is missing, so the disk cannot be read; see the backups"
            raise VirtbusError(Code.CONFLICT, "layer_missing", message) from None
        except OSError as error:
            raise store_error(error) from error

    def names(self) -> frozenset[str]:
        try:
            found = [path.name for path in self.root.iterdir()]
        except FileNotFoundError:
            return frozenset()
        return frozenset(name for name in found if name.endswith(SUFFIX) and name[0] != ".")

    def find(self) -> Iterator[FoundDisk]:
        """Yield all layers; their images count as used."""
        for name in sorted(self.names()):
            try:
                made: Overlay | None = self.read(name)
            except VirtbusError:
                made = None
            yield FoundDisk(name.partition(".")[0], str(self.root / name), made)

    def take(self, disk: str, folder: int, name: str) -> None:
        """Make the file of a disk in the open `folder` a layer; may be repeated after a crash.

        Afterwards the disk has no file, until a staged file gets the disk's name.
        """
        with self.opened() as below:
            if name not in openat2.names(below) and disk + SUFFIX in openat2.names(folder):
                with contextlib.suppress(FileNotFoundError):  # imaged as root writes no notes
                    note = openat2.read_small(disk + NOTE_SUFFIX, folder, 4096)
                    openat2.replace(name.removesuffix(SUFFIX) + NOTE_SUFFIX, note, below)
                os.rename(disk + SUFFIX, name, src_dir_fd=folder, dst_dir_fd=below)
                # If QEMU's user owns the file, the agent changes the mode.
                with contextlib.suppress(PermissionError):
                    os.chmod(name, READABLE, dir_fd=below)
            os.fsync(below)

    def lend(self, path: Path, name: str) -> None:
        """Give the file of a copied snapshot a second name, as a layer.

        Disks can then rest on the layer. May be repeated.
        """
        with self.opened() as below, openat2.opened_directory(path.parent) as there:
            with contextlib.suppress(FileExistsError):
                os.link(path.name, name, src_dir_fd=there, dst_dir_fd=below, follow_symlinks=False)
            with contextlib.suppress(PermissionError):
                os.chmod(name, READABLE, dir_fd=below)
            made = read_disk(name.removesuffix(SUFFIX), below)
            if os.geteuid() != 0:
                note = encode_json(dataclasses.asdict(made))
                openat2.replace(name.removesuffix(SUFFIX) + NOTE_SUFFIX, note, below)
            os.fsync(below)
