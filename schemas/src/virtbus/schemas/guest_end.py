"""What became of a guest, by itself or by others."""

from typing import Literal

from virtbus.schemas.model import Fact


class GuestEnd(Fact):
    """How and when a run of the guest ended.

    `how`: it powered itself off (`shut down`), was destroyed (`ended`), its emulator died
    (`crashed`), its kernel said by the pvpanic device that it failed (`panicked`), or its watchdog
    powered it off (`watchdog`). To a run strategy the last two are crashes. `asked`: a stop, a
    restart, a delete or a move wanted that.
    """

    how: Literal["shut down", "ended", "crashed", "panicked", "watchdog"]
    asked: bool
    at_ns: int
