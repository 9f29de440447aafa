"""What became of a guest, by itself or by others."""

from typing import Literal

from virtbus.schemas.model import Fact


class GuestEnd(Fact):
    """How and when a run of the guest ended.

    `how`: it powered itself off (`shut down`), was destroyed (`ended`), or its emulator died
    (`crashed`). `asked`: a stop, a restart, a delete or a move wanted that.
    """

    how: Literal["shut down", "ended", "crashed"]
    asked: bool
    at_ns: int
