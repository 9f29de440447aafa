"""Opens disks that are copied: of a VM, or of a volume, with the image that a disk rests on."""

from pathlib import Path

from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.export_conversion import OpenedSource
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat


def opened_disk(files: DiskFolders, folder: str, name: str, store: ImageStore) -> OpenedSource:
    """Open a disk and its image. Blocks on the disk. The disk keeps its image in the store.

    The header is read by our own parser, because a guest may have changed it.

    Raises:
        VirtbusError: 404 `disk_missing`; 409 `disk_damaged`, `disk_mismatch`, `disk_unreadable`;
            503 `store_error`.
    """
    found = files.read(folder, name)
    if found is None:
        message = "the disk does not exist on this node; a first start of its VM makes it"
        raise VirtbusError(Code.NOT_FOUND, "disk_missing", message)
    image = Path(found.backing_path) if found.backing_path else None
    if image is not None and (
        image.parent != store.data_dir or found.backing_format not in set(ImageFormat)
    ):
        message = "the disk rests on a file outside the image store; it is not read"
        raise VirtbusError(Code.CONFLICT, "disk_mismatch", message)
    path = files.path(folder, name)
    return OpenedSource(path, image, found.virtual_size_bytes, found.backing_format)
