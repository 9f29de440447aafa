"""Selects images to remove when space is needed: unused images, the least recently used first."""

from collections.abc import Iterable
from typing import NamedTuple


class StoredImage(NamedTuple):
    """An image, its size on the disk, and the time of its last use under any of its names.

    `held` is True if a disk, a pull, a VM's record or a pin uses the image, or if it was uploaded.
    `plain` is True if the image has a name of `images.d`. An operator may have pulled such an image
    in advance, so it is removed last.
    """

    digest: str
    disk_bytes: int
    used_s: float
    held: bool
    plain: bool = False


def evicted(images: Iterable[StoredImage], need_bytes: int) -> tuple[str, ...]:
    """Return the digests of the images to remove for `need_bytes`, in order.

    Return `()` if all unused images together have fewer bytes.
    """
    free = [image for image in images if not image.held]
    found, freed_bytes = [], 0
    for image in sorted(free, key=lambda image: (image.plain, image.used_s, image.digest)):
        if freed_bytes >= need_bytes:
            break
        found.append(image.digest)
        freed_bytes += image.disk_bytes
    return tuple(found) if freed_bytes >= need_bytes else ()
