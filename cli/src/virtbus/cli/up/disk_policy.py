"""Decides how much free disk space the bus needs, and the action when less is free.

All sizes are in bytes. A small disk may be for the bus alone, so its limits are lower.
"""

from dataclasses import dataclass
from enum import StrEnum

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Room:
    """Free and total bytes of a disk. `reserved` is True if our reserve file exists."""

    free_bytes: int
    total_bytes: int
    reserved: bool

    @property
    def reserve_bytes(self) -> int:
        """Return the size of the reserve file, which is deleted when the disk is full.

        On a single host, the bus and the guests' disks share one disk. When that disk is full, the
        reserve's space lets the server restart and store deletes of VMs, which free more space.
        """
        return min(64 * _MIB, self.total_bytes // 20)

    @property
    def low_bytes(self) -> int:
        """Return the free space below which VM creates are refused.

        For comparison: 1,000 VMs' records and events take about 10 MiB.
        """
        return min(256 * _MIB, self.total_bytes // 10)

    @property
    def needed_bytes(self) -> int:
        """Return the free space below which a starting server would stall."""
        return min(16 * _MIB, self.total_bytes // 40)

    @property
    def low(self) -> bool:
        return self.free_bytes < self.low_bytes


class DiskAction(StrEnum):
    """The next action: GIVE deletes the reserve file, TAKE creates it."""

    NOTHING = "nothing"
    RESTART = "restart"
    GIVE = "give"
    TAKE = "take"


def step(room: Room, *, stalled: bool) -> DiskAction:
    """Return the next action.

    A stalled server restarts if there is enough space; if not, the reserve is deleted first.
    The reserve is created again when the server works and there is enough space.
    """
    if stalled:
        if room.free_bytes >= room.needed_bytes:
            return DiskAction.RESTART
        return DiskAction.GIVE if room.reserved else DiskAction.NOTHING
    if not room.reserved and room.free_bytes >= room.low_bytes + room.reserve_bytes:
        return DiskAction.TAKE
    return DiskAction.NOTHING
