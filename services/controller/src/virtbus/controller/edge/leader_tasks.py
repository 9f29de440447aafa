"""Runs the leader tasks while this controller holds the fleet lease."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from virtbus.controller.edge.lease import LeaderTerm, LeaseLostError, Leases
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

ROLE = "fleet"
AGAIN_S = 5.0

Duty = Callable[[LeaderTerm], Coroutine[Any, Any, None]]
"""A leader task. It runs until cancelled, and calls `check()` of its term before each write."""


class LeaderTasks:
    """The leader tasks of this controller, under one lease."""

    def __init__(self, leases: Leases, duties: Sequence[Duty]) -> None:
        self._leases = leases
        self._duties = tuple(duties)
        self.tenure: LeaderTerm | None = None
        """The current term; None while another controller is the leader."""

    async def run(self) -> None:
        """Run the tasks whenever this controller holds the lease; wait for it in between."""
        while True:
            try:
                async with self._leases.hold(ROLE) as self.tenure:
                    await self._do(self.tenure)
            except* LeaseLostError as lost:
                log.warning(
                    "leader tasks end: %s", lost.exceptions[0], extra={"code": "lease_lost"}
                )
            finally:
                self.tenure = None

    async def _do(self, tenure: LeaderTerm) -> None:
        async with asyncio.TaskGroup() as group:
            for duty in self._duties:
                group.create_task(self._again(duty, tenure))

    async def _again(self, duty: Duty, tenure: LeaderTerm) -> None:
        """Run a task, and restart it after a VirtbusError.

        Tasks should skip unreadable values. If a task fails at such a value, the restart keeps the
        value from ending one controller after another.
        """
        while True:
            try:
                await duty(tenure)
            except VirtbusError as error:
                log.error("a leader task restarts: %s", error, extra={"code": "duty_again"})
                await asyncio.sleep(AGAIN_S)
            else:
                return
