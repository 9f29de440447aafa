"""Runs the child tasks of one VM, by name, and repeats steps until they succeed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

WRITING = frozenset({"prepare", "save"})
"""Tasks that write the VM's files in threads, which a cancellation does not end."""

Work = Callable[[], Awaitable[None]]
"""A function that its task calls, so that a task cancelled before it ran leaves nothing behind."""


class Tasks:
    """The child tasks of one VM, by name, in its task group."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()
        self._again: dict[str, SmallEvent] = {}

    def run(self, name: str, work: Work, failed: Callable[[], None] | None = None) -> None:
        """Run `work` as the VM's child task `name`; cancel an earlier task of that name.

        An unexpected error is logged with its traceback, and `failed` is called. So it affects no
        other VM, and this VM gets a defined phase.
        """
        assert self.group is not None  # noqa: S101  set before the first event is taken
        self.stop(name)
        task = self._tasks[name] = self.group.create_task(self._guarded(work, failed))
        if name in WRITING:
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _guarded(self, work: Work, failed: Callable[[], None] | None) -> None:
        try:
            await work()
        except Exception:
            extra = {"code": "action_failed", "uid": self._uid}
            log.exception("an action failed unexpectedly", extra=extra)
            if failed is not None:
                failed()

    def stop(self, *names: str) -> None:
        """Cancel the tasks of these names."""
        for name in names:
            if name in self._tasks:
                self._tasks[name].cancel()

    def set_timer(self, after_s: float, then: Callable[[], None] | None) -> None:
        """Set the VM's only timer: call `then` after `after_s`. With None, only cancel it."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if then is None else loop.call_later(after_s, then)

    def cancel(self) -> None:
        """Cancel the timer and all child tasks."""
        self.set_timer(0, None)
        self.stop(*self._tasks)

    def running(self, name: str) -> asyncio.Task[None] | None:
        """Return the task of that name; None if it has ended or never began."""
        task = self._tasks.get(name)
        return task if task is not None and not task.done() else None

    def begun(self, *names: str) -> list[asyncio.Task[None]]:
        """Return the tasks of these names that were begun, also those that ended."""
        return [self._tasks[name] for name in names if name in self._tasks]

    async def written(self) -> None:
        """Return once no cancelled task still writes a file in a thread."""
        if self._writing:
            await asyncio.wait(self._writing)

    def repeat(
        self,
        name: str,
        work: Work,
        vm: ActorState,
        report: Callable[[], None],
        over: SmallEvent | None = None,
    ) -> None:
        """Run an idempotent step as the task `name`, and repeat it until it succeeds.

        The status shows the last error. If `over` is set, the goal was reached by other means, and
        the step is not repeated.
        """
        again = self._again[name] = SmallEvent()
        self.run(name, partial(self._until_done, work, vm, report, over, again))

    def wake(self, name: str) -> None:
        """Let the step of that name be tried again now, if it waits for its next try."""
        self._again[name].set()

    async def _until_done(
        self,
        work: Work,
        vm: ActorState,
        report: Callable[[], None],
        over: SmallEvent | None,
        again: SmallEvent,
    ) -> None:
        delay_s, reported = RETRY_S[0], ""
        while over is None or not over.is_set():
            again.clear()
            try:
                await work()
            except* (VirtbusError, BusError) as group:
                error = group.exceptions[0]
                vm.observed.message = reported = f"the agent retries: {error}"
                report()
                extra = {"code": "step_retry", "uid": self._uid}
                log.warning("retry in %.1f s: %s", delay_s, error, extra=extra)
            else:
                break
            woken = await wait_for_event(again if over is None else over, delay_s)
            delay_s = RETRY_S[0] if woken else min(delay_s * 2, RETRY_S[1])
        if reported and vm.observed.message == reported:  # the step succeeded after an error
            vm.observed.message = ""
            report()
