"""Bounded queue from callbacks to one task. Cancelling the task loses no item."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of at most `capacity` items and `capacity_bytes` bytes (0: no limit of bytes).

    A full queue drops its oldest items and sets `overflowed`. `size_of` returns an item's bytes.
    """

    def __init__(
        self,
        capacity: int,
        *,
        capacity_bytes: int = 0,
        size_of: Callable[[T], int] = lambda _: 0,
    ) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._size_of = size_of
        self._held_bytes = 0
        self._wake = asyncio.Event()
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        size_bytes = self._size_of(item)
        while self._items and (
            len(self._items) >= self._capacity
            or self._held_bytes + size_bytes > self._capacity_bytes > 0
        ):
            self._pop()
            self.overflowed = True
        self._items.append(item)
        self._held_bytes += size_bytes
        self._wake.set()

    def _pop(self) -> T:
        item = self._items.popleft()
        self._held_bytes -= self._size_of(item)
        return item

    def take(self) -> T | None:
        return self._pop() if self._items else None

    def clear(self) -> None:
        self._items.clear()
        self._held_bytes = 0
        self.overflowed = False

    def wake(self) -> None:
        self._wake.set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for an item or a call of `wake`; return False if neither came in time."""
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
        return self._pop()
