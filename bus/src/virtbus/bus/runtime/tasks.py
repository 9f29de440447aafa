"""Runs background tasks in a TaskGroup that does not wrap its body's exceptions."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from virtbus.bus.runtime.small_event import SmallEvent


async def wait_for_event(event: asyncio.Event | SmallEvent, timeout_s: float | None) -> bool:
    """Return True once the event is set, or False after `timeout_s` (None: no limit)."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class Background:
    """The tasks of one `background()` context. The context's end cancels them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it returns or the context ends.

        Raises:
            RuntimeError: the context has ended. `work` is closed.
        """
        try:
            task = self._group.create_task(work)
        except RuntimeError:
            work.close()  # prevents Python's warning "coroutine was never awaited"
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def settle(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)


@asynccontextmanager
async def background() -> AsyncIterator[Background]:
    """Yield a `Background` for tasks. The end of the context's body cancels them.

    A plain TaskGroup wraps an exception of its body in an ExceptionGroup. Callers of the bus catch
    `VirtbusError`, so this context raises the body's exception unwrapped.
    """
    own: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = Background(group)
            try:
                yield tasks
            except BaseException as error:
                own = error
                raise
            finally:
                tasks.cancel()
    except BaseExceptionGroup as failures:
        if own is not None and own in failures.exceptions and len(failures.exceptions) == 1:
            raise own from own.__cause__
        raise
