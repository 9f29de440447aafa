"""Computes digests of files that are read or copied, and makes finished files durable."""

import hashlib
import os

from virtbus.imaged.edge.partial_download import store_error

CHUNK_BYTES = 4 * 1024**2
_FROZEN = 0o444
"""The mode of a finished file: qemu-img in the sandbox runs as another user, and must read the
file. The modes of the folders keep all other users out."""


class Digester:
    """Computes the digest of an open file, and copies it to `target` if given.

    `step` blocks on the disk.
    """

    def __init__(self, source: int, target: int | None = None) -> None:
        self._source = source
        self._target = target
        self._digest = hashlib.sha256()
        self.done_bytes = 0

    def step(self) -> int:
        """Process the next bytes; return their number, 0 at the end; raises VirtbusError 503."""
        try:
            data = os.pread(self._source, CHUNK_BYTES, self.done_bytes)
            if self._target is not None:
                write_all(self._target, data)
        except OSError as error:
            raise store_error(error) from error
        self._digest.update(data)
        self.done_bytes += len(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"


def write_all(target: int, data: bytes) -> None:
    """Write all of `data`; raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def freeze(descriptor: int) -> None:
    """Make a finished file durable and read-only; raises VirtbusError 503."""
    try:
        os.fchmod(descriptor, _FROZEN)
        os.fsync(descriptor)
    except OSError as error:
        raise store_error(error) from error
