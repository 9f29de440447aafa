"""Lists a node's images within size limits: pages for people, and keys for placement."""

from collections.abc import Iterable, Mapping

from virtbus.imaged.core.links import NameLink
from virtbus.schemas.image import MAX_IMAGE_KEYS, ImageInfo, image_key, names_within
from virtbus.schemas.node_rpc import HeldImages

PAGE_BYTES = 64 * 1024
"""Size limit of a page."""
_IMAGE_BYTES = 256
"""Maximum size of an image without its names."""


def listing(images: Mapping[str, ImageInfo], links: Iterable[NameLink]) -> tuple[ImageInfo, ...]:
    """Return the images, ordered by digest, each with its sorted names in the form for people."""
    names: dict[str, set[str]] = {}
    for link in links:
        names.setdefault(link.digest, set()).add(link.shown)
    return tuple(
        image.model_copy(update={"names": tuple(sorted(names.get(digest, ())))})
        for digest, image in sorted(images.items())
    )


def page_of(images: Mapping[str, ImageInfo], links: Iterable[NameLink], after: str) -> HeldImages:
    """Return a page of the images after the digest `after`: at least one image, if any is left."""
    found = listing({d: image for d, image in images.items() if d > after}, links)
    left_bytes = PAGE_BYTES
    page: list[ImageInfo] = []
    for image in found:
        shown = _shown(image)
        left_bytes -= _IMAGE_BYTES + sum(len(name.encode()) for name in shown.names)
        if page and left_bytes < 0:
            return HeldImages(images=tuple(page), next=page[-1].digest)
        page.append(shown)
    return HeldImages(images=tuple(page))


def _shown(image: ImageInfo) -> ImageInfo:
    names = names_within(image.names, PAGE_BYTES - _IMAGE_BYTES)
    more = len(image.names) - len(names)
    return image.model_copy(update={"names": names, "more_names": more})


def keys_of(
    links: Iterable[NameLink], used_s: Mapping[str, float], digests: frozenset[str]
) -> tuple[str, ...]:
    """Return the sorted keys of the images `digests` and of their names.

    The result has at most `MAX_IMAGE_KEYS` keys: those of the most recently used names.
    """
    by_use = sorted(links, key=lambda link: used_s.get(link.name, 0.0), reverse=True)
    keys: dict[str, None] = {}
    for link in by_use:
        if link.digest in digests:
            # For a create with an image name of the bus, placement uses the plain name's key.
            name = link.name if "://" in link.name else link.shown
            keys |= dict.fromkeys((image_key(name), image_key(link.digest)))
        if len(keys) >= MAX_IMAGE_KEYS:
            break
    return tuple(sorted(list(keys)[:MAX_IMAGE_KEYS]))
