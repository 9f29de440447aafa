"""Selects images to remove when space is needed: unused ones, the least recently used first."""

from collections.abc import Iterable
from typing import NamedTuple


class StoredImage(NamedTuple):
    """An image, its size on the disk, and its last use by any of its names.

    `held`: a disk, a pull, a record of a VM or a pin uses it, or it was uploaded. `plain`: it has a
    name of `images.d`. An operator may have pulled such an image in advance, so it is removed after
    all others.
    """

    digest: str
    disk_bytes: int
    used_s: float
    held: bool
    plain: bool = False


def evicted(images: Iterable[StoredImage], need_bytes: int) -> tuple[str, ...]:
    """Return the images to remove for `need_bytes`, in order; none if even all are not enough."""
    free = [image for image in images if not image.held]
    found, freed_bytes = [], 0
    for image in sorted(free, key=lambda image: (image.plain, image.used_s, image.digest)):
        if freed_bytes >= need_bytes:
            break
        found.append(image.digest)
        freed_bytes += image.disk_bytes
    return tuple(found) if freed_bytes >= need_bytes else ()
