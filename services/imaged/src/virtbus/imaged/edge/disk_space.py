"""Checks the free space of the node's disks before a copy is written."""

import os
from pathlib import Path

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.partial_download import disk_full
from virtbus.schemas.quantity import format_bytes


class DiskSpace:
    """The free space above the floor that each node keeps. Blocks on the disk."""

    def __init__(self, disks: Path, limits: SpaceLimits) -> None:
        self._disks = disks
        self._limits = limits

    def check_room(self, more_bytes: int) -> None:
        """Raise 503 `disk_full` unless so many more bytes leave the floor of free space."""
        space = os.statvfs(self._disks)
        share = int(space.f_blocks * space.f_frsize * self._limits.min_free_ratio)
        floor_bytes = max(share, self._limits.min_free_bytes)
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes - more_bytes < floor_bytes:
            raise disk_full(
                f"the node has {format_bytes(free_bytes)} free for copies of disks and must keep "
                f"{format_bytes(floor_bytes)} (settings min_free_bytes, min_free_ratio); the "
                f"copy needs {format_bytes(more_bytes)} more"
            )
