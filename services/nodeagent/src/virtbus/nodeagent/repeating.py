"""Repeats idempotent steps of a VM until they succeed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from virtbus.bus.ports import BusError
from virtbus.schemas.errors import VirtbusError

if TYPE_CHECKING:
    from virtbus.nodeagent.guest import Guest

log = logging.getLogger(__name__)

RETRY_S = (0.5, 10.0)

Work = Callable[[], Awaitable[None]]
"""Started by its task, so that one cancelled before it ran leaves nothing behind."""


async def until_done(guest: "Guest", work: Work, over: asyncio.Event | None = None) -> None:
    """Repeat an idempotent step until it succeeds.

    `over` is set once the goal was reached by other means; then the step is not repeated.
    """
    over = over or asyncio.Event()
    delay_s, told = RETRY_S[0], ""
    while not over.is_set():
        try:
            await work()
        except* (VirtbusError, BusError) as group:
            error = group.exceptions[0]
            guest.seen.message = told = f"tried again: {error}"
            guest.report()
            log.warning(
                "retry in %.1f s: %s",
                delay_s,
                error,
                extra={"code": "step_retry", "uid": guest.record.uid},
            )
        else:
            break
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await over.wait()
        delay_s = min(delay_s * 2, RETRY_S[1])
    if told and guest.seen.message == told:  # the problem is solved
        guest.seen.message = ""
        guest.report()
