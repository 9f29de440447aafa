"""Finds the image of an existing disk, and refuses a disk that was made from another image."""

from pathlib import Path

from virtbus.imaged.core.disk_requests import DiskRequest, mismatch
from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.image import ImageFormat


def base_of(store: ImageStore, disk: DiskRequest, found: Overlay) -> str:
    """Return the digest of an existing disk's image, empty for an empty disk.

    `found` is the lowest layer of the disk, or the disk itself if it has no layers.

    Raises:
        VirtbusError: 409 `disk_mismatch`: the disk was made from another image, or rests on a file
            outside the image store. Or only one of the disk and the request has an image.
    """
    path = Path(found.backing_path) if found.backing_path else None
    if (path is not None) != (disk.source is not None):
        raise mismatch(disk.volume, "it is " + ("empty" if path is None else "of an image"))
    if path is None or disk.source is None:
        return ""
    if path.parent != store.data_dir or found.backing_format not in set(ImageFormat):
        raise mismatch(disk.volume, "it rests on a file outside the image store")
    digest = f"sha256:{path.name}"
    pin = disk.source.file_digest
    if pin is not None and not store.may_be(pin, digest):
        raise mismatch(disk.volume, f"it was made of {digest}")
    return digest
