"""Work queue: merges changes of a key, serialises its reconciles, retries failures.

Each kind has a lane with its own workers. While the bridge does not lead, the queue drops new keys.
This loses nothing, because a new leader reconciles every object. A lane with `always` keeps all
keys.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.runtime.controller import Key, Kind
from virtbus.kubebridge.edge.cluster import StatusError
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

REST_S = 0.15
"""Seconds between two reconciles of a key. Changes in between are handled together."""
AGAIN_S = (0.2, 10.0)
"""First and longest delay after failures, in seconds."""

Handle = Callable[[Key], Awaitable[float]]
"""Reconciles a key. Returns the seconds before the next reconcile without a change.

0 means that only a change causes the next reconcile.
"""


@dataclass(frozen=True, slots=True)
class Lane:
    """The reconciles of one kind, of which `workers` run at once.

    A reconcile begins `gather_s` seconds after a change, so that it covers further changes, too.
    """

    handle: Handle
    workers: int
    gather_s: float = 0.0
    always: bool = False
    """True if the lane also works while the bridge does not lead."""
    queue: asyncio.Queue[Key] = field(default_factory=asyncio.Queue)


class WorkQueue:
    """The queue. It works while `leads` is set. A lane with `always` works all the time."""

    def __init__(self, leads: asyncio.Event, sources: Sources = REAL) -> None:
        self._leads = leads
        self._sources = sources
        self._lanes: dict[Kind, Lane] = {}
        self._queued: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._rest_until_s: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._retries_s: dict[Key, Iterator[float]] = {}
        """The delays of keys that failed."""
        self.dropped = False
        """True if a key was dropped because this bridge did not lead."""

    def add_lane(self, kind: Kind, lane: Lane) -> None:
        self._lanes[kind] = lane

    @property
    def idle(self) -> bool:
        """True if no key is queued or in work. Timers do not count."""
        return not self._queued and not self._busy

    def add(self, key: Key) -> None:
        rest_s = self._rest_until_s.get(key, 0.0) - asyncio.get_running_loop().time()
        self._add(key, max(rest_s, self._lanes[key.kind].gather_s))

    def _add(self, key: Key, after_s: float = 0.0) -> None:
        if not (self._leads.is_set() or self._lanes[key.kind].always):
            self.dropped = True
        elif key in self._busy:
            self._again.add(key)
        elif key not in self._queued:
            if after_s > 0:
                self._later(key, after_s)
            else:
                self._queued.add(key)
                self._lanes[key.kind].queue.put_nowait(key)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                for _ in range(lane.workers):
                    group.create_task(self._worker(lane))

    async def _worker(self, lane: Lane) -> None:
        while True:
            key = await lane.queue.get()
            if not lane.always:
                await self._leads.wait()
            self._queued.discard(key)
            self._busy.add(key)
            if timer := self._timers.pop(key, None):
                timer.cancel()
            try:
                after_s = await self._handled(lane.handle, key)
            finally:
                self._busy.discard(key)
            self._rested(key)
            if key in self._again:
                self._again.discard(key)
                after_s = min(after_s, REST_S) if after_s else REST_S
            if after_s:
                self._later(key, after_s)

    async def _handled(self, handle: Handle, key: Key) -> float:
        asked_s = 0.0
        extra = {"code": "reconcile_failed"}
        try:
            after_s = await handle(key)
        except StatusError as answer:
            asked_s = answer.retry_after_s
            transient = answer.transient or answer.code in {404, 409}
            level = logging.INFO if transient else logging.WARNING
            log.log(level, "%s %s: %s", key.kind.kind, key.path, answer, extra=extra)
        except (BusError, VirtbusError) as error:
            if isinstance(error, VirtbusError):
                asked_s = (error.body.after_ms or 0) / 1000
            log.info("%s %s: %s", key.kind.kind, key.path, error, extra=extra)
        except Exception:
            log.exception("%s %s", key.kind.kind, key.path, extra=extra)
        else:
            self._retries_s.pop(key, None)
            return after_s
        return max(asked_s, next(self._retries_s.setdefault(key, delays(*AGAIN_S, self._sources))))

    # --- time -----------------------------------------------------------------------------
    def _later(self, key: Key, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + after_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(after_s, self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._add(key)

    def _rested(self, key: Key) -> None:
        """Remember the end of the key's pause until the pause is over.

        If the key is reconciled again during its pause, the end of the first pause also ends the
        second pause. This is harmless.
        """
        loop = asyncio.get_running_loop()
        self._rest_until_s[key] = until_s = loop.time() + REST_S
        loop.call_at(until_s, self._rest_until_s.pop, key, None)
