"""Runs costly work one piece at a time, fairly by account, with rests in between (ADR 0028)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from virtbus.bus.client.fair_shares import FairQueue

REST = 2.0
"""Seconds of rest for each second of work: contended work takes a third of the loop's time."""
LEAST_REST_S = 0.005
"""Shorter rests are added up until they reach this: the loop's timers are not finer than 1 ms."""
MOST_REST_S = 0.1
"""Limit of a rest. The time of a turn may include a wait for a send, which does not block the loop.
"""


class Pace:
    """Gives turns to work. Accounts alternate; one account's work keeps its order.

    If no other work waits, there is no rest.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._owed_s = 0.0

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Wait for a turn; the body is the work."""
        loop = asyncio.get_running_loop()
        if self._taken:
            await self._next_of(account)
        self._taken = True
        try:
            begun_s = loop.time()
            yield
            self._owed_s += REST * (loop.time() - begun_s)
            await self._rest()
        finally:
            self._pass()

    async def _next_of(self, account: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(account, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # this task had been given the turn already
                self._pass()
            raise

    def _pass(self) -> None:
        """Give the turn to the next task that still waits."""
        while (turn := self._waiting.next()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    async def _rest(self) -> None:
        await asyncio.sleep(0)  # a caller whose work never waits would keep the loop
        if not self._waiting:
            self._owed_s = 0.0
        elif self._owed_s >= LEAST_REST_S:
            rest_s, self._owed_s = min(self._owed_s, MOST_REST_S), 0.0
            await asyncio.sleep(rest_s)
