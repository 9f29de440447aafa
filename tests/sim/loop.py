"""Virtual time and simulated processes on one event loop.

Every handle belongs to the process whose context made it. Within a process handles run in asyncio's
order; between processes the seed decides. Nothing of a killed process runs any more, no `finally`
either, as after kill -9; its tasks are kept and unwound quietly once the seed is over (`bury`).
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

EPOCH_NS = 1_800_000_000_000_000_000
"""Unix time at the start of every simulation."""


class Process:
    """One simulated process. `steps` counts the handles it ran: each is between two awaits."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.stalled = False
        self.steps = 0
        self.crash_at = 0
        self.on_crash: Callable[[], None] = self.kill
        self.ready: deque[Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._loop = loop

    def start(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `body` as a task of the process."""
        self._loop.call_soon(self._begin, body, context=self.context)

    def _begin(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.keep(self._loop.create_task(body()))

    def kill(self) -> None:
        """End it here and now."""
        self.alive = False
        self._loop.forget(self)

    def stall(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        if self.alive and not self.stalled:
            self.stalled = True
            self._loop.forget(self)
            self._loop.outside(self._loop.time() + for_s, self._go_on)

    def _go_on(self) -> None:
        self.stalled = False
        if self.alive:
            self._loop.runnable(self)


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("simulated process")


class _Task(asyncio.Task[Any]):
    """Hashes by its number, so that sets of tasks have one order in every run."""

    _numbers = itertools.count()

    def __init__(self, coro: Any, **more: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number

    @classmethod
    def restart(cls) -> None:
        cls._numbers = itertools.count()


def _task(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> _Task:
    return _Task(coro, loop=loop, **more)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock jumps to the next timer; it has no sockets and no threads."""

    def __init__(self, rng: random.Random, *, shuffle: bool) -> None:
        super().__init__()
        self.set_debug(False)
        _Task.restart()
        self.set_task_factory(_task)
        self.set_exception_handler(lambda _loop, told: self.unhandled.append(told))
        self.unhandled: list[dict[str, Any]] = []
        self.over = False
        self._rng = rng
        self._shuffle = shuffle
        self._now_s = 0.0
        self._count = itertools.count()
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._runnable: list[Process] = []
        self._graveyard: deque[Handle] = deque()
        self._kept: list[asyncio.Task[Any]] = []
        self.world = Process(self, "world")

    def time(self) -> float:
        return self._now_s

    def now_ns(self) -> int:
        """Unix nanoseconds, on a clock that never errs."""
        return EPOCH_NS + int(self._now_s * 1e9)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Unwind `task` at the end."""
        self._kept.append(task)

    # --- handles --------------------------------------------------------------------------
    # typeshed's three are generic in their arguments; nothing here depends on these.
    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def outside(self, when_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call at a time whatever becomes of the calling process."""
        return self.call_at(when_s, callback, context=self.world.context)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """It is left out when its time comes."""

    def _enqueue(self, handle: Handle) -> None:
        process: Process = handle._context.get(PROCESS, self.world)  # type: ignore[attr-defined]  # CPython's
        if not process.alive:
            self._graveyard.append(handle)
            return
        process.ready.append(handle)
        if len(process.ready) == 1 and not process.stalled:
            self._runnable.append(process)

    def runnable(self, process: Process) -> None:
        """It may run again."""
        if process.ready and process not in self._runnable:
            self._runnable.append(process)

    def forget(self, process: Process) -> None:
        """Run nothing of it for now, or never again."""
        if process in self._runnable:
            self._runnable.remove(process)
        if not process.alive:
            self._graveyard.extend(process.ready)
            process.ready.clear()

    # --- running --------------------------------------------------------------------------
    def _run_once(self) -> None:
        runnable, rng = self._runnable, self._rng
        while runnable and not self._stopping:  # type: ignore[attr-defined]
            index = 0
            if self._shuffle and len(runnable) > 1:
                index = int(rng.random() * len(runnable))
            process = runnable[index]
            handle = process.ready.popleft()
            if not process.ready:
                del runnable[index]
            if handle._cancelled:
                continue
            process.steps += 1
            if process.steps == process.crash_at:
                self._graveyard.append(handle)
                process.on_crash()
                continue
            handle._run()
        if not self._stopping:  # type: ignore[attr-defined]
            self._advance()

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            msg = "everybody waits for ever"
            raise RuntimeError(msg)
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._enqueue(handle)

    # --- the end --------------------------------------------------------------------------
    def bury(self) -> None:
        """Unwind every task there ever was; `over` tells the ports that nothing counts any more."""
        self.over = True
        self.world.alive = True
        for task in self._kept:
            task.cancel()
        waiting = [*self._graveyard, *(h for p in self._runnable for h in p.ready)]
        self._graveyard.clear()
        self._runnable.clear()
        asyncio.set_event_loop(self)
        asyncio.events._set_running_loop(self)  # as run_forever does
        try:
            self._unwind(deque(waiting))
        finally:
            asyncio.events._set_running_loop(None)  # as run_forever does
            asyncio.set_event_loop(None)
        self.close()

    def _unwind(self, handles: deque[Handle]) -> None:
        setattr(self, "_enqueue", handles.append)  # noqa: B010  all processes are one now
        for _ in range(200_000):
            if not handles:
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                if not left:
                    return
                for task in left:
                    task.cancel()
                if not handles:
                    self._advance()
            handle = handles.popleft() if handles else None
            if handle is not None and not handle.cancelled():
                handle._run()
