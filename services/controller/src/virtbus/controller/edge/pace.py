"""Turns for contended work: one at a time, accounts in turn, with rests (ADR 0028)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from virtbus.bus.client.fair_shares import FairQueue

REST = 2.0
"""Seconds of rest for each second of work: contended work takes a third of the loop's time."""
LEAST_REST_S = 0.005
"""Rests are saved up to this: the loop's timers are no finer than a millisecond."""
MOST_REST_S = 0.1
"""A turn may include a send that waits; it is no measure of the loop's time then."""


class Pace:
    """Work in turns. Accounts take turns; each is served in order. Lone work is not slowed."""

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
            if not turn.cancelled():  # it had the turn already
                self._pass()
            raise

    def _pass(self) -> None:
        """Give the turn to the next one that still waits."""
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
