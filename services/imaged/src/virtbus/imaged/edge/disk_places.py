"""Finds and opens the disks of VMs, volumes and snapshots that operations copy or replace."""

import os
from dataclasses import dataclass
from pathlib import Path

from virtbus.imaged.core.bitmaps import usable_bitmaps
from virtbus.imaged.core.overlay import HEAD_BYTES, Overlay
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.export_conversion import OpenedSource
from virtbus.imaged.edge.layer_files import LayerFolder
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.volume_files import DISK
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.snapshot_ref import SnapshotRef
from virtbus.schemas.volume_ref import VolumeRef


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """A disk on the host. Its image, if any, is in the store, and stays while the disk exists."""

    path: Path
    overlay: Overlay
    lowest: Overlay
    """The overlay directly on the image: `overlay`, or that of the lowest layer."""
    layers: tuple[Path, ...] = ()
    """The files between the disk and its image, from the top."""

    @property
    def below(self) -> tuple[str, ...]:
        image = (Path(self.lowest.backing_path).name,) if self.lowest.backing_path else ()
        return (*(path.name for path in self.layers), *image)

    @property
    def used_bytes(self) -> int:
        """Return the disk space of the disk, its layers and its image; raises OSError."""
        image = (Path(self.lowest.backing_path),) if self.lowest.backing_path else ()
        return sum(path.stat().st_blocks * 512 for path in (self.path, *self.layers, *image))

    @property
    def layers_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.layers)

    def opened(self) -> OpenedSource:
        """Open the disk, its layers and its image; raises VirtbusError 409 `disk_unreadable`."""
        image = Path(self.lowest.backing_path) if self.lowest.backing_path else None
        size = self.overlay.virtual_size_bytes
        return OpenedSource(self.path, image, size, self.lowest.backing_format, layers=self.layers)

    def bitmaps(self) -> frozenset[str]:
        """Return the disk's usable bitmaps; raises VirtbusError as `opened`, 503 `store_error`."""
        with self.opened() as source:
            disk = source.disk
            try:
                head = os.pread(disk, HEAD_BYTES, 0)
                return usable_bitmaps(head, lambda at, length: os.pread(disk, length, at))
            except OSError as error:
                raise store_error(error) from error


class DiskPlaces:
    """The disks of a node. All methods block on the disk.

    virtbus' own parser reads the headers, because a guest may have changed them.
    """

    def __init__(self, pools: Pools, store: ImageStore) -> None:
        self._files = pools.files
        self._pools = pools
        self._layers = LayerFolder(pools.files.root)
        self._images = store.data_dir

    def of(self, uid: str, disk: str, ref: VolumeRef | None) -> DiskPlace:
        """Return the disk of the volume `ref`; without `ref`, the VM's own `disk`.

        Raises:
            VirtbusError: 404 `disk_missing`. 409 `disk_damaged`, `disk_mismatch`. 503
                `store_error`. The errors of `Pools.of` and `LayerFolder.chain`.
        """
        files, folder, name = self._file(uid, disk, ref)
        found = files.read(folder, name)
        if found is None:
            message = "the disk does not exist on this node; a first start of its VM makes it"
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", message)
        return self._placed(files.path(folder, name), found)

    def note_merged(self, uid: str, disk: str, ref: VolumeRef | None, inode: int) -> None:
        """Note that a guest's QEMU has merged the disk's layers, so it rests only on its image.

        No effect if the disk's file has another inode number than `inode`. Errors as `of`.
        """
        files, folder, name = self._file(uid, disk, ref)
        files.note_merged(folder, name, inode, self.of(uid, disk, ref).lowest)

    def _file(self, uid: str, disk: str, ref: VolumeRef | None) -> tuple[DiskFolders, str, str]:
        if ref is None:
            return self._files, uid, disk
        return self._pools.of(ref, to_read=True), ref.folder, DISK

    def of_snapshot(self, ref: SnapshotRef, disk: str) -> DiskPlace:
        """Return a disk of a snapshot; an empty `disk` means the first disk.

        Raises:
            VirtbusError: 404 `snapshot_missing`, `disk_missing`. The other errors of `of`.
        """
        files = SnapshotFolders(self._files.root)
        note = files.complete(ref.folder)
        if note is None:
            message = f"the node has no complete data of the snapshot {ref.name}"
            raise VirtbusError(Code.NOT_FOUND, "snapshot_missing", message)
        names = [one.name for one in note.disks]
        name = disk or next(iter(names), "")
        found = files.frozen(note, name) if name in names else None
        if found is None:
            message = (
                f"the snapshot {ref.name} has no disk {name}, but {', '.join(names) or 'none'}"
            )
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", message)
        return self._placed(files.frozen_path(note, name), found)

    def _placed(self, path: Path, found: Overlay) -> DiskPlace:
        names, lowest = self._layers.chain(found)
        if lowest.backing_path and (
            Path(lowest.backing_path).parent != self._images
            or lowest.backing_format not in set(ImageFormat)
        ):
            message = "the disk rests on a file outside the image store; it is not read"
            raise VirtbusError(Code.CONFLICT, "disk_mismatch", message)
        layers = tuple(self._layers.root / one for one in names)
        return DiskPlace(path, found, lowest, layers)
