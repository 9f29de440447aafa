"""Virtual time and simulated processes on one event loop.

Every step belongs to the process whose context created it. Within a process steps run in
asyncio's order; between processes the seed decides. After a kill no step of the process runs any
more, not even `finally`, as after kill -9. Its tasks are kept and unwound once the seed is over
(`bury`).
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

EPOCH_NS = 1_800_000_000_000_000_000
"""Unix time at the start of every simulation."""


class Step:
    """A callback of one process: asyncio's handle without its support for debuggers."""

    __slots__ = ("_when_s", "args", "callback", "context", "dead", "process")

    def __init__(
        self,
        process: "Process",
        context: contextvars.Context,
        callback: Any,
        args: Any,
        when_s: float,
    ) -> None:
        self.process = process
        self.context = context
        self.callback = callback
        self.args = args
        self.dead = False
        self._when_s = when_s

    def cancel(self) -> None:
        self.dead = True
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.dead

    def when(self) -> float:
        return self._when_s


class Process:
    """One simulated process. `steps` counts its steps: each is between two awaits."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.stalled = False
        self.steps = 0
        self.crash_at = 0
        self.on_crash: Callable[[], None] = self.kill
        self.ready: deque[Step] = deque()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._loop = loop

    def start(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `body` as a task of the process."""
        self._loop.call_soon(self._begin, body, context=self.context)

    def _begin(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.keep(self._loop.create_task(body()))

    def kill(self) -> None:
        """End it immediately."""
        self.alive = False
        self._loop.forget(self)

    def stall(self, for_s: float) -> None:
        """Send SIGSTOP, and SIGCONT after `for_s`."""
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

    def __init__(self, rng: random.Random, *, shuffle: bool, pace: int = 1) -> None:
        super().__init__()
        self.set_debug(False)
        _Task.restart()
        self.set_task_factory(_task)
        self.set_exception_handler(lambda _loop, told: self.unhandled.append(told))
        self.unhandled: list[dict[str, Any]] = []
        self.over = False
        self._rng = rng
        self._shuffle = shuffle
        self.pace = pace
        self._now_s = 0.0
        self._count = itertools.count()
        self._timers: list[tuple[float, int, Step]] = []
        self._runnable: list[Process] = []
        self._graveyard: deque[Step] = deque()
        self._kept: list[asyncio.Task[Any]] = []
        self.world = Process(self, "world")

    def time(self) -> float:
        return self._now_s

    def now_ns(self) -> int:
        """Return Unix nanoseconds, on a clock without error."""
        return EPOCH_NS + int(self._now_s * 1e9)

    def shown_ns(self) -> int:
        """Return what the clock of a process without an error shows."""
        return EPOCH_NS + int(self._now_s * self.pace * 1e9)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Unwind `task` at the end."""
        self._kept.append(task)

    # --- steps ----------------------------------------------------------------------------
    # typeshed's three are generic in their arguments; nothing here depends on these.
    def _step(self, when_s: float, callback: Any, args: Any, context: Any) -> Step:
        if context is None:
            context = contextvars.copy_context()
        return Step(context.get(PROCESS, self.world), context, callback, args, when_s)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Step:
        step = self._step(self._now_s, callback, args, context)
        self._enqueue(step)
        return step

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Step:
        step = self._step(when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._count), step))
        return step

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Step:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def outside(self, when_s: float, callback: Callable[[], None]) -> Step:
        """Call at a time, even if the calling process dies."""
        step = Step(self.world, self.world.context, callback, (), when_s)
        heapq.heappush(self._timers, (when_s, next(self._count), step))
        return step

    def _enqueue(self, step: Step) -> None:
        process = step.process
        if not process.alive:
            self._graveyard.append(step)
            return
        process.ready.append(step)
        if len(process.ready) == 1 and not process.stalled:
            self._runnable.append(process)

    def runnable(self, process: Process) -> None:
        """Resume it."""
        if process.ready and process not in self._runnable:
            self._runnable.append(process)

    def forget(self, process: Process) -> None:
        """Run no step of it for now, or never again."""
        if process in self._runnable:
            self._runnable.remove(process)
        if not process.alive:
            self._graveyard.extend(process.ready)
            process.ready.clear()

    # --- running --------------------------------------------------------------------------
    def _run_once(self) -> None:
        """Run until `stop` is called."""
        runnable, draw = self._runnable, self._rng.random
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._advance()
                continue
            index = 0
            if self._shuffle and len(runnable) > 1:
                index = int(draw() * len(runnable))
            process = runnable[index]
            step = process.ready.popleft()
            if not process.ready:
                del runnable[index]
            if step.dead:
                continue
            process.steps += 1
            if process.steps == process.crash_at:
                self._graveyard.append(step)
                process.on_crash()
            else:
                self._run(step)

    def _run(self, step: Step) -> None:
        try:
            step.context.run(step.callback, *step.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  as asyncio's handles do
            self.call_exception_handler({"message": f"in {step.callback}", "exception": error})

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].dead:
            heapq.heappop(timers)
        if not timers:
            msg = "everybody waits for ever"
            raise RuntimeError(msg)
        now_s = self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= now_s:
            step = heapq.heappop(timers)[2]
            if not step.dead:
                self._enqueue(step)

    # --- end ------------------------------------------------------------------------------
    def bury(self) -> None:
        """Unwind every task; `over` tells the ports that effects no longer count."""
        self.over = True
        self.world.alive = True
        for task in self._kept:
            task.cancel()
        waiting = [*self._graveyard, *(step for p in self._runnable for step in p.ready)]
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

    def _unwind(self, steps: deque[Step]) -> None:
        setattr(self, "_enqueue", steps.append)  # noqa: B010  all processes are one now
        for _ in range(200_000):
            if not steps:
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                if not left:
                    return
                for task in left:
                    task.cancel()
                if not steps:
                    self._advance()
            step = steps.popleft() if steps else None
            if step is not None and not step.dead:
                self._run(step)
