"""Encodes and decodes the marks on a device (ADR 0060).

The last MiB of a device belongs to virtbus. The first block of this MiB has the mark `claim`, which
names the device's volume. virtbus writes `claim` before the content. The second block has the mark
`filled`, which says that the content is complete. virtbus writes `filled` last. A mark has a
checksum, so an incomplete write counts as no mark.
"""

import hashlib
from typing import Literal

from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import LenientModel
from virtbus.schemas.pool import END_BYTES as END_BYTES
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import decode, encode_json, validate

BLOCK_BYTES = 4096
MAGIC = b"VBMARK1\0"
_HEAD = len(MAGIC) + 32 + 4


class DeviceMark(LenientModel):
    """A mark of a device. Only the mark `filled` has a digest, a size and an operation."""

    kind: Literal["claim", "filled"]
    ref: VolumeRef
    digest: str = ""
    """SHA-256 of the written content."""
    size_bytes: int = 0
    """The size that the guest sees."""
    operation: str = ""
    """The operation that wrote the content."""


def sealed(mark: DeviceMark) -> bytes:
    """Return a mark as one block."""
    body = encode_json(mark)
    head = MAGIC + hashlib.sha256(body).digest() + len(body).to_bytes(4, "big")
    block = head + body
    if len(block) > BLOCK_BYTES:
        msg = f"a mark of {len(block)} bytes"
        raise ValueError(msg)
    return block + bytes(BLOCK_BYTES - len(block))


def unsealed(block: bytes) -> DeviceMark | None:
    """Return the mark in a block; None if the block has no complete mark."""
    length = int.from_bytes(block[_HEAD - 4 : _HEAD], "big")
    body = block[_HEAD : _HEAD + length]
    if not block.startswith(MAGIC + hashlib.sha256(body).digest()):
        return None
    try:
        return validate(DeviceMark, decode(body))
    except VirtbusError:
        return None
