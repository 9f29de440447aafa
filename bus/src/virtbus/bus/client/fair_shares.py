"""Shares a limit fairly among callers, and queues their waiting items in fair order."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

GREED = 3
"""A caller may take units while its own units are fewer than GREED times the free units.

A single caller gets three quarters of all units.
"""


class FairShares:
    """`total` units, which callers take and release.

    A caller with many units is refused earlier than a caller with few units. So later callers find
    free units. The empty name stands for virtbus's own services: only `total` limits them.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, int] = {}
        self.held = 0

    def take(self, caller: str, amount: int = 1) -> bool:
        """Take `amount` (≥ 1) units; return False if the caller may not have them."""
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

    def exceed(self, caller: str) -> None:
        """Take one unit without a limit. Use it if the caller will soon release another unit."""
        self.held += 1
        if caller:
            self._held[caller] = self._held.get(caller, 0) + 1

    def release(self, caller: str, amount: int = 1) -> None:
        self.held -= amount
        if caller:
            left = self._held[caller] - amount
            if left:
                self._held[caller] = left
            else:
                del self._held[caller]


class FairQueue(Generic[T]):
    """A queue that serves callers in turn, and each caller's items in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, caller: str, item: T) -> None:
        self._waiting.setdefault(caller, deque()).append(item)

    def callers(self) -> Iterator[str]:
        return iter(tuple(self._waiting))

    def next(self) -> T | None:
        return self.take(next(iter(self._waiting))) if self._waiting else None

    def take(self, caller: str) -> T:
        items = self._waiting.pop(caller)
        item = items.popleft()
        if items:
            self._waiting[caller] = items
        return item
