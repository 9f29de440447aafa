"""Checks the free space of the node's disks before a copy is written."""

import os
from pathlib import Path

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.partial_download import disk_full
from virtbus.schemas.quantity import format_bytes


class DiskSpace:
    """Compares the free space with the space that the node must keep. Blocks on the disk."""

    def __init__(self, disks: Path, limits: SpaceLimits) -> None:
        self._disks = disks
        self._limits = limits

    def check_room(self, more_bytes: int) -> None:
        """Raise 503 `disk_full` if `more_bytes` need space that the node must keep free."""
        disk = os.statvfs(self._disks)
        free_bytes = disk.f_bavail * disk.f_frsize
        floor_bytes = self._limits.floor_bytes(disk.f_blocks * disk.f_frsize)
        if free_bytes - more_bytes < floor_bytes:
            raise disk_full(
                f"the node has {format_bytes(free_bytes)} free for copies of disks and must keep "
                f"{format_bytes(floor_bytes)} (reserve of the pool, or settings min_free_bytes, "
                f"min_free_ratio); the copy needs {format_bytes(more_bytes)} more"
            )
