"""Turns for contended work: one at a time, with rests while others wait (ADR 0028)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

REST = 2.0
"""Seconds of rest for each second of work: contended work takes a third of the loop's time."""
LEAST_REST_S = 0.005
"""Rests are saved up to this: the loop's timers are no finer than a millisecond."""
MOST_REST_S = 0.1
"""A turn may include a send that waits; it is no measure of the loop's time then."""


class Pace:
    """Work in turns, first come, first served. Uncontended work is not slowed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._owed_s = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn; the body is the work."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            begun_s = loop.time()
            yield
            self._owed_s += REST * (loop.time() - begun_s)
            await self._rest()
        finally:
            self._lock.release()

    async def _rest(self) -> None:
        await asyncio.sleep(0)  # a caller whose work never waits would keep the loop
        if not self._waiting:
            self._owed_s = 0.0
        elif self._owed_s >= LEAST_REST_S:
            rest_s, self._owed_s = min(self._owed_s, MOST_REST_S), 0.0
            await asyncio.sleep(rest_s)
