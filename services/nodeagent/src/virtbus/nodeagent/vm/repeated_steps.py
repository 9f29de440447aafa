"""Repeats a step of a VM until it succeeds."""

import logging
from collections.abc import Awaitable, Callable

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]
"""Makes a coroutine only when its task runs. So a task that is cancelled before it runs leaves no
coroutine that was never awaited."""


async def until_done(
    work: Work,
    vm: ActorState,
    report: Callable[[], None],
    over: SmallEvent | None,
    again: SmallEvent,
) -> None:
    """Repeat an idempotent step until it succeeds. The status shows the last error.

    If `over` is set, the goal was reached by other means, and the step is not repeated. Without
    `over`, setting `again` ends the delay before the next try.
    """
    delay_s, reported = RETRY_S[0], ""
    while over is None or not over.is_set():
        again.clear()
        try:
            await work()
        except* (VirtbusError, BusError) as group:
            error = group.exceptions[0]
            vm.observed.message = reported = f"the agent retries: {error}"
            report()
            extra = {"code": "step_retry", "uid": vm.record.uid}
            log.warning("retry in %.1f s: %s", delay_s, error, extra=extra)
        else:
            break
        woken = await wait_for_event(again if over is None else over, delay_s)
        delay_s = RETRY_S[0] if woken else min(delay_s * 2, RETRY_S[1])
    if reported and vm.observed.message == reported:  # the step succeeded after an error
        vm.observed.message = ""
        report()
