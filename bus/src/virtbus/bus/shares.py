"""Fair shares of a limit among callers, and turns among those who wait."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

GREED = 3
"""A caller may hold this many times what is still free: alone, three quarters of the limit."""


class Shares:
    """`total` units, which callers take and release.

    Who holds much is refused before who holds little, so nobody can hold them all: some are left
    for each caller that comes later. A caller without a name is one of our own services; it is
    bounded by `total` only.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, int] = {}
        self.held = 0

    def take(self, caller: str, amount: int = 1) -> bool:
        """Take `amount` units, one at least, if the caller may have them."""
        free = self._total - self.held
        if amount > free:
            return False
        if caller:
            own = self._held.get(caller, 0)
            if own >= GREED * free:
                return False
            self._held[caller] = own + amount
        self.held += amount
        return True

    def release(self, caller: str, amount: int = 1) -> None:
        """Give back what was taken."""
        self.held -= amount
        if caller:
            left = self._held[caller] - amount
            if left:
                self._held[caller] = left
            else:
                del self._held[caller]


class Turns(Generic[T]):
    """Who waits: first come, first served for each caller, and the callers in turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}

    def add(self, caller: str, item: T) -> None:
        """Wait behind what the same caller has waiting."""
        self._waiting.setdefault(caller, deque()).append(item)

    def callers(self) -> Iterator[str]:
        """The callers that wait, whose turn it is first."""
        return iter(tuple(self._waiting))

    def take(self, caller: str) -> T:
        """The oldest item of a caller, whose next turn comes after all others'."""
        items = self._waiting.pop(caller)
        item = items.popleft()
        if items:
            self._waiting[caller] = items
        return item
