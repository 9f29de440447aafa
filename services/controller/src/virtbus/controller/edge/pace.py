"""Runs costly work in turns, fairly by account, with a rest after each turn (ADR 0028)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from virtbus.bus.client.fair_shares import FairQueue

REST = 2.0
"""Seconds of rest for each second of work. While work waits, it takes a third of the loop's time.
"""
LEAST_REST_S = 0.005
"""Shorter rests are added up until they reach this time: the loop's timers have a step of 1 ms."""
MOST_REST_S = 0.1
"""Limit of a rest. A turn may be long because it waits for a send, which does not block the loop.
"""


class Pace:
    """Gives turns to work. Accounts alternate; the work of an account keeps its order.

    While no other work waits, a turn ends without a rest.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._owed_s = 0.0

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
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
            if not turn.cancelled():  # `_pass` gave this task the turn before the cancel
                self._pass()
            raise

    def _pass(self) -> None:
        while (turn := self._waiting.next()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    async def _rest(self) -> None:
        await asyncio.sleep(0)  # without it, work that never awaits would keep the loop
        if not self._waiting:
            self._owed_s = 0.0
        elif self._owed_s >= LEAST_REST_S:
            rest_s, self._owed_s = min(self._owed_s, MOST_REST_S), 0.0
            await asyncio.sleep(rest_s)
