"""Decides how much disk space the bus needs, and the action if there is less.

All sizes are in bytes. The limits are lower on a small disk, which may be for the bus alone.
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

        The space of the reserve lets the server restart and store deletes of VMs. On a single host,
        guests' disks are on the same disk as the bus. Without the reserve, the bus could not store
        the deletes of VMs that would free space.
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
        """Return the free space that a server needs at its start; with less it would stall."""
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

    If the server is stalled, restart it if there is space for it, otherwise delete the reserve.
    Create the reserve again when the server works and there is enough space.
    """
    if stalled:
        if room.free_bytes >= room.needed_bytes:
            return DiskAction.RESTART
        return DiskAction.GIVE if room.reserved else DiskAction.NOTHING
    if not room.reserved and room.free_bytes >= room.low_bytes + room.reserve_bytes:
        return DiskAction.TAKE
    return DiskAction.NOTHING
