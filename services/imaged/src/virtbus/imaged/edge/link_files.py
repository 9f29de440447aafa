"""Reads the links from image names to stored images (`links/`) at the start of imaged."""

import logging

from virtbus.imaged.core.links import MAX_LINK_BYTES, NameLink, file_name, hex_of
from virtbus.imaged.edge import openat2
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import sealed_ref
from virtbus.schemas.wire import read

log = logging.getLogger(__name__)


def read_link(file: str, folder: int, there: frozenset[str]) -> NameLink | None:
    """Return the link in a file of the open `folder`; None if it is not usable.

    `there` are the stored images. A link to any other image is removed: a crash has interrupted the
    removal of the link and its image. If `there` is empty, the file system of the images may not be
    mounted, so the link stays.
    """
    if file.startswith(".tmp-"):
        openat2.remove(file, folder)
        return None
    try:
        link = read(NameLink, openat2.read_small(file, folder, MAX_LINK_BYTES))
    except (OSError, VirtbusError) as error:
        log.warning("links/%s is ignored: %s", file, error, extra={"code": "link_damaged"})
        return None
    # An old version stored the query, which is a secret.
    secret = sealed_ref(link.name)[1] or sealed_ref(link.url or link.name)[1]
    if secret or (there and hex_of(link.digest) not in there):
        openat2.remove(file, folder)
        return None
    return link if file_name(link.name) == file else None
