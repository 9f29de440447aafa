"""Defines freezes of guests' file systems, and the ports that make and store freezes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Frozen:
    """A freeze of a guest's file systems. `trouble` is the error of the last attempt to thaw."""

    since_ns: int
    until_ns: int
    trouble: str = ""


class FreezeFiles(Protocol):
    """The deadlines of frozen guests on disk."""

    async def keep(self, uid: str, frozen: Frozen) -> None:
        """Store the freeze durably. Raises VirtbusError 503 `state_write`."""

    async def forget(self, uid: str) -> None:
        """Remove the freeze, if any. A failure is only logged."""

    async def all(self) -> Mapping[str, Frozen]:
        """Return all freezes by uid. An unreadable freeze has the deadline 0."""


FreezeChange = Literal["frozen", "extended", "thawed", "not thawed"]
"""A report about a freeze. After "not thawed", the agent tries again."""


class Freezes(Protocol):
    """Freezes of this host's guests.

    Each freeze ends at its deadline, even if its client is gone.
    """

    heard: Callable[[str, FreezeChange, str], None]
    """Called at each change of a freeze, with the guest's uid, the change and the reason."""

    def of(self, uid: str) -> Frozen | None:
        """Return the freeze of a guest, or None."""

    async def freeze(self, uid: str, *, for_s: float, timeout_s: float) -> None:
        """Freeze the guest for `for_s`, or set the new deadline of a frozen guest.

        Raises:
            VirtbusError: the call failed. A guest that the call may have frozen is thawed at once.
                A guest that was frozen before keeps its deadline.
        """

    async def thaw(self, uid: str, why: str, *, timeout_s: float) -> None:
        """Thaw the guest. After a VirtbusError, the guest stays frozen until its deadline."""

    def ended(self, uid: str) -> None:
        """Forget a freeze, because the guest ended or rebooted."""
