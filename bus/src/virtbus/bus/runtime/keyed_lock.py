"""A lock for each key, such as a VM's uid."""

import asyncio
from weakref import WeakValueDictionary


class KeyedLock:
    """Locks by key; each exists while a task holds or awaits it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """Return the key's lock, for use as `async with`."""
        return self._locks.setdefault(key, asyncio.Lock())
