"""Provides a lock for each key, for example for each VM's uid."""

import asyncio
from weakref import WeakValueDictionary


class KeyedLock:
    """Locks by key. A key's lock exists only while a task uses it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())
