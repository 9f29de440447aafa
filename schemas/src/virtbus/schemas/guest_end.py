"""The end of a guest's run."""

from typing import Literal

from virtbus.schemas.model import LenientModel


class GuestExit(LenientModel):
    """The cause and time of the end of a guest's run.

    `how`: the guest powered itself off (`shut down`); it was destroyed (`ended`); its emulator died
    (`crashed`); its kernel reported a failure by the pvpanic device (`panicked`); its watchdog
    powered it off (`watchdog`). A run strategy treats `panicked` and `watchdog` like `crashed`.
    `asked`: a stop, restart, delete or move requested the end.
    """

    how: Literal["shut down", "ended", "crashed", "panicked", "watchdog"]
    asked: bool
    at_ns: int
