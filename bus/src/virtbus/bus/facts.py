"""Facts: stored soon, in order of emission, never on anyone's reply path."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from virtbus.bus.backoff import delays
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


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact on its way."""

    subject: str
    body: bytes
    message_id: str
    headers: dict[str, str]


class Facts:
    """A bounded queue and the pump that empties it. Over capacity the oldest are dropped."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._queue: deque[Fact] = deque()
        self._wake = asyncio.Event()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.dropped = 0

    def add(self, fact: Fact) -> None:
        """Queue a fact."""
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
        """Until stored; the id makes a repeat harmless (dedupe window 10 min)."""
        for delay_s in delays(0.1, 5.0):
            try:
                await self._records.store(
                    fact.subject, fact.body, fact.headers, message_id=fact.message_id
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
