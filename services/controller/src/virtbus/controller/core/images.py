"""Which images each node has, as keys of references and digests: for placement only."""

from hashlib import sha256
from typing import NamedTuple

from virtbus.controller.core.vm_keys import refuse_foreign
from virtbus.schemas import subjects
from virtbus.schemas.ids import is_id
from virtbus.schemas.node import NodeImages
from virtbus.schemas.wire import encode, read


class HasImages(NamedTuple):
    """The keys of a node's images, and what is equal for nodes with the same ones."""

    keys: frozenset[str] = frozenset()
    mark: bytes = b""


_NONE = HasImages()


class KnownImages:
    """What nodes said last."""

    def __init__(self) -> None:
        self._of: dict[str, HasImages] = {}

    def of(self, node: str) -> HasImages:
        """The images of a node; none where it said nothing."""
        return self._of.get(node, _NONE)

    def put(self, key: str, value: bytes) -> str:
        """Take in one key; the node. VirtbusError where the value is not of its key."""
        told = read(NodeImages, value)
        refuse_foreign(key, is_id(told.node) and subjects.node_images(told.node))
        mark = sha256(encode(sorted(told.keys))).digest()
        self._of[told.node] = HasImages(frozenset(told.keys), mark)
        return told.node

    def purge(self, key: str) -> str:
        """Nothing is known of a node's images any more; the node."""
        node = key.split(".")[2]
        self._of.pop(node, None)
        return node

    def known(self) -> set[str]:
        """The keys of all that is known."""
        return {subjects.node_images(node) for node in self._of}
