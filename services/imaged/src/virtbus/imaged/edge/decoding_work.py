"""Decodes a fetched file in short steps off the event loop, and limits the cost."""

import time
from collections.abc import Callable, Iterator

from virtbus.imaged.core.archive import DamagedError
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.partial_download import PartialDownload

_READ_BYTES = 256 * 1024
_STEP_S = 0.05
"""Time that a disk thread works between checks for cancellation."""


def chunks(part: PartialDownload) -> Iterator[bytes]:
    """Yield all bytes of a part. Blocks on the disk."""
    offset = 0
    while chunk := part.read_at(offset, _READ_BYTES):
        offset += len(chunk)
        yield chunk


class DecodingWork:
    """Counts the bytes and CPU time of decoding one image, and limits their sums."""

    def __init__(self, limits: TransferLimits, worked: Callable[[int], None]) -> None:
        self._limits = limits
        self._worked = worked
        self._reported_bytes = 0
        self._bytes = 0
        self._cpu_s = 0.0

    def counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield decoded pieces, counted. Runs in disk threads."""
        most = self._limits.max_bytes
        for piece in pieces:
            self._bytes += len(piece)
            if self._bytes > most:
                msg = f"it expands to more than {most} bytes in all (setting max_bytes)"
                raise DamagedError(msg)
            yield piece

    def run_steps(self, steps: Iterator[None]) -> bool:
        """Run steps for _STEP_S; return False after the last step. Runs in disk threads."""
        began_s, end_s = time.thread_time(), time.monotonic() + _STEP_S
        try:
            return any(time.monotonic() >= end_s for _ in steps)
        finally:
            self._cpu_s += time.thread_time() - began_s

    def check(self) -> None:
        """Report progress; raise DamagedError if decoding took too much CPU time for the size."""
        limits = self._limits
        self._worked(self._bytes - self._reported_bytes)
        self._reported_bytes = self._bytes
        if self._cpu_s > limits.free_decode_s + self._bytes / limits.least_decode_bytes_s:
            msg = (
                f"its {self._bytes} bytes took {self._cpu_s:.0f} s of CPU time to read; "
                "build the image again, with fewer entries and one stream of compressed data"
            )
            raise DamagedError(msg)
