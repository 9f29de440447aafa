"""Reads and closes an open file of an export or backup, and packs data into it."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK_BYTES = 4 * 1024**2


class ExportPart:
    """An open file. `close` does not block; all other methods block on the disk."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def written_bytes(self) -> int:
        """Return the disk space of the file."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, at: int) -> bytes:
        return os.pread(self.descriptor, CHUNK_BYTES, at)

    @contextmanager
    def packed(self) -> Iterator[gzip.GzipFile]:
        """Yield a writer that compresses its input by gzip; equal input gives equal files."""
        with (
            os.fdopen(self.descriptor, "wb", closefd=False) as file,
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        ):
            yield packed
