"""Facts: stored soon, in order of emission, never on anyone's reply path.

The stream holds the facts of all nodes, and refuses a message id that it has seen. So the id that
the server is told is random: nobody else can have used it before. It makes our own repeats
harmless. The fact's own id stands in its body; emitters and readers compare those.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass

from virtbus.bus.backoff import delays
from virtbus.bus.ids import uuid7
from virtbus.bus.ports import (
    BusError,
    DeniedError,
    FullError,
    OutcomeUnknownError,
    UnavailableError,
)
from virtbus.bus.records import Records

log = logging.getLogger(__name__)

CAPACITY = 16_384
"""About 16 MB: what two controllers accept in a burst of 10,000 creates before the bus has it."""
AT_ONCE = 256
SAME_S = 600.0
"""Within so many seconds a process stores a fact with the same subject and id once."""
REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact on its way."""

    subject: str
    body: bytes
    message_id: str
    """The fact's own id; who repeats a step gives the same one."""
    headers: dict[str, str]
    stored_id: str
    """What the server is told: `stored_id`."""


def stored_id(subject: str, message_id: str) -> str:
    """The id by which the stream knows a repeat.

    Random where nodes write to the stream, too. Nobody but controllers writes dead letters: there
    the first of several controllers that tell the same is the one that is stored.
    """
    return uuid7() if shared(subject) else message_id


def shared(subject: str) -> bool:
    """True for a stream that nodes may write to."""
    return subject.startswith("virtbus.evt.")


class Told:
    """The facts that were emitted of late, so that a step done again is one fact."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._at_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def again(self, subject: str, message_id: str, now_s: float) -> bool:
        """True when the same was emitted within SAME_S."""
        key = subject, message_id
        if now_s - self._at_s.get(key, -SAME_S) < SAME_S:
            return True
        self._at_s[key] = now_s
        self._at_s.move_to_end(key)
        if len(self._at_s) > self._limit:
            self._at_s.popitem(last=False)
        return False


class Facts:
    """A bounded queue and the pump that empties it. Over capacity the oldest are dropped."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._queue: deque[Fact] = deque()
        self._wake = asyncio.Event()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._told = Told()
        self.dropped = 0

    def add(self, fact: Fact) -> None:
        """Queue a fact, unless it was emitted of late."""
        if self._told.again(fact.subject, fact.message_id, asyncio.get_running_loop().time()):
            return
        if len(self._queue) >= CAPACITY:
            self._queue.popleft()
            self._drop("the queue is full")
        self._queue.append(fact)
        self._idle.clear()
        self._wake.set()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, 8 …: the log stays readable
            log.warning(
                "%d facts dropped so far: %s", self.dropped, why, extra={"code": "facts_dropped"}
            )

    async def pump(self) -> None:
        """Store facts until cancelled, in the order of emission where none is tried again."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for _ in range(min(len(self._queue), AT_ONCE - self._under_way)):
                    self._under_way += 1
                    group.create_task(self._drain())

    async def _drain(self) -> None:
        """Store one after the other while there are any: a burst needs no task for each."""
        try:
            while self._queue:
                await self._store(self._queue.popleft())
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _store(self, fact: Fact) -> None:
        """Until stored; the id makes a repeat harmless (the stream's dedupe window)."""
        for delay_s in delays(0.1, 5.0):
            try:
                await self._records.store(
                    fact.subject, fact.body, fact.headers, message_id=fact.stored_id
                )
            except (UnavailableError, OutcomeUnknownError) as error:
                log.debug("fact %s waits: %s", fact.subject, error)
            except (DeniedError, FullError) as error:
                self._drop(str(error))
                return
            except BusError as error:
                self._drop(str(error))
                return
            else:
                return
            await asyncio.sleep(delay_s)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all is stored, at most `timeout_s`; says how many were left."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning(
                "%d facts not stored at the end", len(self._queue), extra={"code": "facts_left"}
            )
