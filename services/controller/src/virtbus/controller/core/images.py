"""Caches the images that each node reports, for placement, and the image names on the bus.

A node reports its images as keys, which are made of references and digests.
"""

from hashlib import sha256
from typing import NamedTuple

from virtbus.controller.core.named_records import NamedRecords
from virtbus.schemas import subjects
from virtbus.schemas.ids import is_id
from virtbus.schemas.node import NodeImages
from virtbus.schemas.records import read_image_name, read_stored, refuse_foreign
from virtbus.schemas.wire import encode


class HasImages(NamedTuple):
    """The keys of a node's images. `mark` is equal for nodes with the same images."""

    keys: frozenset[str] = frozenset()
    mark: bytes = b""


_NONE = HasImages()


class KnownImages:
    """The last report of each node, and in `names` the image names on the bus."""

    def __init__(self) -> None:
        self.names = NamedRecords(
            read_image_name, lambda one: subjects.image_name(one.namespace, one.name)
        )
        self._of: dict[str, HasImages] = {}

    def of(self, node: str) -> HasImages:
        """Return the images of a node; empty if it has not reported."""
        return self._of.get(node, _NONE)

    def put(self, key: str, value: bytes) -> str:
        """Store the report at a node's key `_images`; return the node.

        Raise VirtbusError if the report does not match the key.
        """
        report = read_stored(NodeImages, key, value)
        refuse_foreign(key, is_id(report.node) and subjects.node_images(report.node))
        mark = sha256(encode(sorted(report.keys))).digest()
        self._of[report.node] = HasImages(frozenset(report.keys), mark)
        return report.node

    def purge(self, key: str) -> str:
        """Process the end of a node's report; return the node."""
        node = key.split(".")[2]
        self._of.pop(node, None)
        return node

    def known(self) -> set[str]:
        """Return the bus keys of all stored reports."""
        return {subjects.node_images(node) for node in self._of}
