"""Work queue: deduplicates keys and serialises processing per key.

Different keys run concurrently. A failed key is retried with growing delays.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from virtbus.bus.ports import BusError
from virtbus.bus.sources import REAL, Sources
from virtbus.kubebridge.edge.cluster import Answer
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

AT_ONCE = 32
REST_S = 0.15
"""Pause between two reconciles of a key. Changes in between are handled together."""
AGAIN_S = (0.1, 10.0)
"""First and longest delay after failures."""

Look = Callable[[str], Awaitable[float]]
"""Reconciles a key. Returns the seconds before the next reconcile without a change, or 0."""


class Work:
    """A queue with its workers."""

    def __init__(self, look: Look, sources: Sources = REAL) -> None:
        self._look = look
        self._sources = sources
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._rest_until_s: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}

    @property
    def idle(self) -> bool:
        """Return True if no key is queued or in work. Timers do not count."""
        return not self._queued and not self._busy

    def add(self, key: str) -> None:
        """Queue a key."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._queued:
            rest_s = self._rest_until_s.get(key, 0.0) - asyncio.get_running_loop().time()
            if rest_s > 0:
                self._later(key, rest_s)
            else:
                self._put(key)

    def forget_but(self, keys: set[str]) -> None:
        """Drop all queued keys but these: their objects are gone."""
        for key in [self._queue.get_nowait() for _ in range(self._queue.qsize())]:
            if key in keys:
                self._queue.put_nowait(key)
            else:
                self._queued.discard(key)
        for key in self._failures.keys() - keys:
            del self._failures[key]

    async def run(self, may: asyncio.Event) -> None:
        """Work until cancelled, while `may` is set."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._worker(may))

    async def _worker(self, may: asyncio.Event) -> None:
        while True:
            key = await self._queue.get()
            await may.wait()
            self._queued.discard(key)
            self._busy.add(key)
            if timer := self._timers.pop(key, None):
                timer.cancel()
            try:
                after_s = await self._looked(key)
            finally:
                self._busy.discard(key)
            self._rested(key)
            if key in self._again:
                self._again.discard(key)
                after_s = min(after_s, REST_S) if after_s else REST_S
            if after_s:
                self._later(key, after_s)

    async def _looked(self, key: str) -> float:
        asked_s = 0.0
        try:
            after_s = await self._look(key)
        except Answer as answer:
            asked_s = answer.retry_after_s
            log.info("%s: %s", key, answer, extra={"code": "look_failed"})
        except (BusError, VirtbusError) as error:
            if isinstance(error, VirtbusError):
                asked_s = (error.body.after_ms or 0) / 1000
            log.info("%s: %s", key, error, extra={"code": "look_failed"})
        except Exception:
            log.exception("%s", key, extra={"code": "look_failed"})
        else:
            self._failures.pop(key, None)
            return after_s
        return max(asked_s, self._back_off_s(key))

    def _back_off_s(self, key: str) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        first_s, most_s = AGAIN_S
        bound_s = min(most_s, first_s * 2 ** min(failures, 20))
        return self._sources.uniform(bound_s / 2, bound_s)

    # --- time -----------------------------------------------------------------------------
    def _put(self, key: str) -> None:
        self._queued.add(key)
        self._queue.put_nowait(key)

    def _later(self, key: str, after_s: float) -> None:
        """Set the timer of a key, unless it has an earlier one."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + after_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(after_s, self._due, key)

    def _due(self, key: str) -> None:
        self._timers.pop(key, None)
        if key in self._busy:
            self._again.add(key)
        elif key not in self._queued:
            self._put(key)

    def _rested(self, key: str) -> None:
        """Remember the end of the key's pause, until it is over."""
        loop = asyncio.get_running_loop()
        self._rest_until_s[key] = until_s = loop.time() + REST_S

        def over() -> None:
            if self._rest_until_s.get(key) == until_s:
                del self._rest_until_s[key]

        loop.call_at(until_s, over)
