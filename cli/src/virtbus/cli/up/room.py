"""The disk under the bus: how much room is enough, and what is done where there is none.

All sizes are in bytes. They shrink with a small disk, so that a bus of its own small disk works.
"""

from dataclasses import dataclass
from enum import StrEnum

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Room:
    """What a disk has free, of how much, and whether our reserve lies on it."""

    free_bytes: int
    total_bytes: int
    reserved: bool

    @property
    def reserve_bytes(self) -> int:
        """The file that is given up when the disk is full: room to start again and to delete VMs.

        On one host the bus shares its disk with the guests' disks: without it, what would free
        space (a delete) could not be stored.
        """
        return min(64 * _MIB, self.total_bytes // 20)

    @property
    def low_bytes(self) -> int:
        """Below this creates stop; 1,000 records and their facts are about 10 MiB."""
        return min(256 * _MIB, self.total_bytes // 10)

    @property
    def needed_bytes(self) -> int:
        """A server that starts with less would stall again at once."""
        return min(16 * _MIB, self.total_bytes // 40)

    @property
    def low(self) -> bool:
        return self.free_bytes < self.low_bytes


class Step(StrEnum):
    """What to do now."""

    NOTHING = "nothing"
    RESTART = "restart"
    GIVE = "give"
    TAKE = "take"


def step(room: Room, *, stalled: bool) -> Step:
    """Restart a stalled server once that helps; give the reserve for it, and take it back later."""
    if stalled:
        if room.free_bytes >= room.needed_bytes:
            return Step.RESTART
        return Step.GIVE if room.reserved else Step.NOTHING
    if not room.reserved and room.free_bytes >= room.low_bytes + room.reserve_bytes:
        return Step.TAKE
    return Step.NOTHING
