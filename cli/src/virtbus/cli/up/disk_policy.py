"""Policy for the disk of the bus: how much space is enough, and the action if there is less.

All sizes are in bytes. They shrink with a small disk, so that a bus with its own small disk works.
"""

from dataclasses import dataclass
from enum import StrEnum

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Room:
    """Free and total space of a disk, and whether our reserve file exists."""

    free_bytes: int
    total_bytes: int
    reserved: bool

    @property
    def reserve_bytes(self) -> int:
        """Return the size of the file that is deleted when the disk is full.

        It leaves space to restart the server and to delete VMs. On one host the bus shares its disk
        with the guests' disks. Without the reserve, a delete, which would free space, could not be
        stored.
        """
        return min(64 * _MIB, self.total_bytes // 20)

    @property
    def low_bytes(self) -> int:
        """Return the limit below which creates stop; 1,000 records and events are about 10 MiB."""
        return min(256 * _MIB, self.total_bytes // 10)

    @property
    def needed_bytes(self) -> int:
        """Return the space that a server needs at its start; with less it would stall again."""
        return min(16 * _MIB, self.total_bytes // 40)

    @property
    def low(self) -> bool:
        return self.free_bytes < self.low_bytes


class DiskAction(StrEnum):
    """The next action."""

    NOTHING = "nothing"
    RESTART = "restart"
    GIVE = "give"
    TAKE = "take"


def step(room: Room, *, stalled: bool) -> DiskAction:
    """Return the action: restart a stalled server if that helps; use or recreate the reserve."""
    if stalled:
        if room.free_bytes >= room.needed_bytes:
            return DiskAction.RESTART
        return DiskAction.GIVE if room.reserved else DiskAction.NOTHING
    if not room.reserved and room.free_bytes >= room.low_bytes + room.reserve_bytes:
        return DiskAction.TAKE
    return DiskAction.NOTHING
