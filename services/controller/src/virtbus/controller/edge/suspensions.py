"""Detects suspensions of this process, and the requests that waited during a suspension.

Such a request looks new, because the process reads it only after the suspension. Another controller
may have answered the client meanwhile. A late create would then make a VM that no client wants any
more (F41).
"""

import asyncio
import math

from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import BusError
from virtbus.controller.edge.leader_tasks import ROLE
from virtbus.schemas import subjects

LOOK_S = 1.0
STALL_S = 2.0
"""A look that is later than this shows that the process was suspended: messages may be unread."""


class Suspensions:
    """The suspensions of this process since `run` was called."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._looked_s = math.inf
        self._unread_until_s = -math.inf
        """Requests received until this time (loop's) may have waited; inf while some are unread."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._looked_s = loop.time()
            await asyncio.sleep(LOOK_S)
            if self._late(loop.time()):
                self._unread_until_s = math.inf
                await self._read_all()
                self._unread_until_s = loop.time()

    def waited(self, request: Request) -> bool:
        """Return True for a request that may have waited during a suspension."""
        late = self._late(asyncio.get_running_loop().time())
        return late or request.received_s <= self._unread_until_s

    def _late(self, now_s: float) -> bool:
        return now_s - self._looked_s > LOOK_S + STALL_S

    async def _read_all(self) -> None:
        """Wait for an answer of the bus, which comes after all messages in the connection."""
        while True:
            try:
                await self._bus.get(subjects.lease(ROLE))
            except BusError:
                await asyncio.sleep(LOOK_S)
            else:
                return
