"""A lock for each VM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Queue:
    """A VM's lock, and the number of its holders and waiters."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class KeyedLock:
    """Locks by uid, kept only while in use."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def of(self, uid: str) -> AsyncIterator[None]:
        """Hold the VM's lock for the length of the context."""
        queue = self._queues.setdefault(uid, _Queue())
        queue.users += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.users -= 1
            if not queue.users:
                del self._queues[uid]
