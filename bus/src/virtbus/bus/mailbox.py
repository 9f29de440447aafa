"""A bounded queue that a synchronous receiver fills and one reader empties, safe to cancel."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Over `capacity` the oldest are dropped and `overflowed` becomes true."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._wake = asyncio.Event()
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add without waiting."""
        if len(self._items) >= self._capacity:
            self._items.popleft()
            self.overflowed = True
        self._items.append(item)
        self._wake.set()

    def take(self) -> T | None:
        """The oldest item, or None."""
        return self._items.popleft() if self._items else None

    def clear(self) -> None:
        """Forget all items."""
        self._items.clear()
        self.overflowed = False

    def wake(self) -> None:
        """Let `wait` return although nothing came."""
        self._wake.set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Until there is an item or a wake; False when neither came in time."""
        if self._items:
            return True
        self._wake.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return bool(self._items)
        return True

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()
