"""Stores events in the background, so that no request waits until its event is stored.

The event stream drops a message whose id any node has used before. So the writer chooses a random
id for the server, which a retry repeats. The event's own id is in the body: emitters and readers
compare that id.
"""

import asyncio
import logging
from collections import deque
from typing import NamedTuple

from virtbus.bus.client.records import Records
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.ids import random_token
from virtbus.bus.runtime.recent import Recent
from virtbus.bus.runtime.tasks import wait_for_event

log = logging.getLogger(__name__)

CAPACITY = 16_384
"""Maximum number of queued events, about 16 MB: enough for 10,000 creates by two controllers."""
AT_ONCE = 256
SAME_S = 600.0
"""Within this time, a connection stores events with the same subject and id only once."""
REMEMBERED = 4096
"""Number of recent events that a connection compares for SAME_S."""


class QueuedEvent(NamedTuple):
    """An event that waits to be stored."""

    subject: str
    body: bytes
    message_id: str
    """The event's own id. A repeated step emits the same id again."""
    headers: dict[str, str]
    stored_id: str


def stored_id(subject: str, message_id: str) -> str:
    """Return the id by which the stream recognises a retry.

    The id is random for a stream that nodes write to. Only controllers write dead letters. A dead
    letter keeps `message_id`, so reports by several controllers are stored once.
    """
    return random_token().hex() if shared(subject) else message_id


def shared(subject: str) -> bool:
    """Return True for a stream that nodes may write to."""
    return subject.startswith("virtbus.evt.")


class RecentEvents:
    """Remembers recently emitted events, so that a repeated step stores its event once."""

    def __init__(self) -> None:
        self._at_s: Recent[tuple[str, str], float] = Recent(REMEMBERED)

    def again(self, subject: str, message_id: str, now_s: float) -> bool:
        """Return True if the event was emitted within the last SAME_S; otherwise remember it."""
        key = subject, message_id
        if now_s - self._at_s.get(key, -SAME_S) < SAME_S:
            return True
        self._at_s[key] = now_s
        return False


class EventWriter:
    """A bounded queue of events, and the tasks that store them. A full queue drops the oldest."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._queue: deque[QueuedEvent] = deque()
        self._wake = asyncio.Event()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent = RecentEvents()
        self.dropped = 0

    def add(self, event: QueuedEvent) -> None:
        if self._recent.again(event.subject, event.message_id, asyncio.get_running_loop().time()):
            return
        if len(self._queue) >= CAPACITY:
            self._queue.popleft()
            self._drop("the queue is full")
        self._queue.append(event)
        self._idle.clear()
        self._wake.set()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # logs only the counts 1, 2, 4, 8 …
            log.warning(
                "%d events dropped so far: %s", self.dropped, why, extra={"code": "facts_dropped"}
            )

    async def pump(self) -> None:
        """Store events until cancelled. Retries change the order of events."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for _ in range(min(len(self._queue), AT_ONCE - self._under_way)):
                    self._under_way += 1
                    group.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._queue:
                await self._store(self._queue.popleft())
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _store(self, event: QueuedEvent) -> None:
        for delay_s in delays(0.1, 5.0):
            try:
                await self._records.store(
                    event.subject, event.body, event.headers, message_id=event.stored_id
                )
            except (UnavailableError, OutcomeUnknownError) as error:
                log.debug("event %s not stored yet, will be retried: %s", event.subject, error)
            except BusError as error:
                self._drop(str(error))
                return
            else:
                return
            await asyncio.sleep(delay_s)

    async def flush(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all events are stored; log the number of events left."""
        if not await wait_for_event(self._idle, timeout_s):
            left = len(self._queue) + self._under_way
            log.warning("%d events not stored at exit", left, extra={"code": "facts_left"})
