"""Finds the disks of VMs and volumes that operations read or replace."""

from dataclasses import dataclass
from pathlib import Path

from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.volume_files import DISK, VolumeFolders
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.volume_ref import VolumeRef


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """A disk on the host. Its image, if it has one, is in the store."""

    path: Path
    overlay: Overlay


class DiskPlaces:
    """The disks of a node. All methods block on the disk."""

    def __init__(self, files: DiskFolders, store: ImageStore) -> None:
        self._files = files
        self._volumes = VolumeFolders(files.root)
        self._images = store.data_dir

    def path(self, uid: str, disk: str, ref: VolumeRef | None) -> Path:
        """Return the path of the volume `ref`; without it, of the VM's own `disk`."""
        if ref is None:
            return self._files.path(uid, disk)
        return self._volumes.path(ref.folder, DISK)

    def of(self, uid: str, disk: str, ref: VolumeRef | None) -> DiskPlace:
        """Return the disk, as `path`.

        Raises:
            VirtbusError: 404 `disk_missing`; 409 `disk_damaged`, `disk_mismatch`; 503
                `store_error`.
        """
        files: DiskFolders = self._files if ref is None else self._volumes
        found = files.read(*((uid, disk) if ref is None else (ref.folder, DISK)))
        if found is None:
            message = "the disk does not exist on this node; a first start of its VM makes it"
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", message)
        if found.backing_path and (
            Path(found.backing_path).parent != self._images
            or found.backing_format not in set(ImageFormat)
        ):
            message = "the disk rests on a file outside the image store; it is not read"
            raise VirtbusError(Code.CONFLICT, "disk_mismatch", message)
        return DiskPlace(self.path(uid, disk, ref), found)
