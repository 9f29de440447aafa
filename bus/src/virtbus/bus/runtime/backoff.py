"""Computes retry delays that grow with each failure. Jitter spreads the retries of clients."""

import asyncio
from collections.abc import AsyncIterator, Iterator

from virtbus.bus.runtime.sources import REAL, Sources

LEAST_S = 0.02
"""Least time left for a further attempt. A shorter attempt would end without an answer."""


def delays(first_s: float, most_s: float, sources: Sources = REAL) -> Iterator[float]:
    """Yield endless random delays in seconds, between half of a bound and the bound.

    The bound starts at `first_s`, and doubles up to `most_s`.
    """
    bound_s = first_s
    while True:
        yield sources.uniform(bound_s / 2, bound_s)
        bound_s = min(most_s, bound_s * 2)


class Attempts:
    """Iterates over attempts: `async for left_s in Attempts(timeout_s)` yields the seconds left.

    The first attempt starts at once, each further attempt after a pause. The iteration ends when
    the time left is too short for another attempt.
    """

    def __init__(self, timeout_s: float, sources: Sources = REAL) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + timeout_s
        self._pauses = delays(0.02, 0.5, sources)
        self._first = True

    @property
    def left_s(self) -> float:
        return self._deadline_s - self._loop.time()

    def __aiter__(self) -> AsyncIterator[float]:
        return self

    async def __anext__(self) -> float:
        if self._first:
            self._first = False
            return self.left_s
        pause_s = next(self._pauses)
        if pause_s + LEAST_S < self.left_s:
            await asyncio.sleep(pause_s)
            if self.left_s >= LEAST_S:
                return self.left_s
        raise StopAsyncIteration
