"""What one controller does for all: its duties run while it holds the lease, and end with it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from virtbus.controller.edge.lease import LeaseLostError, Leases, Tenure
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

ROLE = "fleet"
AGAIN_S = 5.0

Duty = Callable[[Tenure], Coroutine[Any, Any, None]]
"""Runs until cancelled; asks `tenure.check()` before each write."""


class Duties:
    """The singletons of the controllers, under one lease."""

    def __init__(self, leases: Leases, duties: Sequence[Duty]) -> None:
        self._leases = leases
        self._duties = tuple(duties)
        self.tenure: Tenure | None = None
        """Set while this controller is the one."""

    async def run(self) -> None:
        """Wait for the lease, do the duties, begin again when it was lost."""
        while True:
            try:
                async with self._leases.hold(ROLE) as self.tenure:
                    await self._do(self.tenure)
            except* LeaseLostError as lost:
                log.warning("duties end: %s", lost.exceptions[0], extra={"code": "lease_lost"})
            finally:
                self.tenure = None

    async def _do(self, tenure: Tenure) -> None:
        async with asyncio.TaskGroup() as group:
            for duty in self._duties:
                group.create_task(self._again(duty, tenure))

    async def _again(self, duty: Duty, tenure: Tenure) -> None:
        """A duty, begun again where a value on the bus stopped it: each duty passes over those.

        None should end here; one that does would end every controller, one after the other.
        """
        while True:
            try:
                await duty(tenure)
            except VirtbusError as error:
                log.error("a duty begins again: %s", error, extra={"code": "duty_again"})
                await asyncio.sleep(AGAIN_S)
            else:
                return
