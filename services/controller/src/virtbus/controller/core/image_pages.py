"""Merges one page of images from each node into a page of the fleet's images."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from virtbus.schemas.image import ImageInfo, names_within
from virtbus.schemas.image_api import ImagePage, NodeImage
from virtbus.schemas.node_rpc import HeldImages

PAGE_BYTES = 256 * 1024
"""Size limit of a page."""
NAMES_BYTES = 64 * 1024
"""Size limit of one image's names, which come from all nodes."""
_IMAGE_BYTES = 256


@dataclass(slots=True)
class _Merged:
    info: ImageInfo
    names: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    more: int = 0


def merged(pages: Mapping[str, HeldImages]) -> ImagePage:
    """Return one page of the fleet's images, ordered by digest, from one page of each node.

    A node may have more images after its page's `next`. So the page ends at the lowest `next`.
    """
    horizon = min((page.next for page in pages.values() if page.next), default="")
    found: dict[str, _Merged] = {}
    for node, page in pages.items():
        for info in page.images:
            if not horizon or info.digest <= horizon:
                one = found.setdefault(info.digest, _Merged(info))
                one.names.update(info.names)
                one.nodes.add(node)
                one.more = max(one.more, info.more_names)
    items: list[NodeImage] = []
    left_bytes = PAGE_BYTES
    for _, one in sorted(found.items()):
        item = _item(one)
        left_bytes -= _IMAGE_BYTES + _bytes(item.names) + _bytes(item.nodes)
        if items and left_bytes < 0:
            return ImagePage(items=tuple(items), continue_=items[-1].digest)
        items.append(item)
    return ImagePage(items=tuple(items), continue_=horizon or None)


def _item(one: _Merged) -> NodeImage:
    names = names_within(sorted(one.names), NAMES_BYTES)
    of_all = {
        "names": names,
        "more_names": one.more + len(one.names) - len(names),
        "nodes": tuple(sorted(one.nodes)),
    }
    return NodeImage(**{**one.info.model_dump(), **of_all})


def _bytes(texts: tuple[str, ...]) -> int:
    return sum(len(text.encode()) for text in texts)
