"""Blocking calls off the loop, with deadlines: a stuck one is left behind and replaced (F10).

Not an executor of the standard library: its threads are joined when the interpreter ends, so that
one call that never returns would keep a broken agent from being restarted.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
STUCK_LIMIT = 4
"""So many calls that never came back, and the agent says that it is not well (F10)."""
IDLE_THREADS = 4


class Call:
    """One call in a thread. `settled` runs once: when it ends or its deadline passes."""

    def __init__(
        self,
        work: Callable[[], Any],
        settled: Callable[[], None] | None,
        ended: Callable[[], None] | None,
    ) -> None:
        self.work = work
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stuck = False
        self.timer: asyncio.TimerHandle | None = None
        self.settled = settled
        self.ended = ended


class Calls(Protocol):
    """What runs libvirt's calls; `Threads` says what each does."""

    stuck: int

    async def call(
        self,
        work: Callable[[], Result],
        *,
        timeout_s: float,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Result: ...

    def close(self) -> None: ...


class Inline:
    """Calls on the loop itself: for libvirt's test driver, in which nothing ever waits."""

    stuck = 0

    async def call(
        self,
        work: Callable[[], Result],
        *,
        timeout_s: float,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Result:
        """The result of `work`, or its exception; `settled` and `ended` run after it."""
        del timeout_s
        try:
            return work()
        finally:
            for after in (settled, ended):
                if after is not None:
                    after()

    def close(self) -> None:
        """Nothing is open."""


class Threads:
    """As many daemon threads as calls are under way; all bookkeeping is on the loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._idle: list[queue.SimpleQueue[Call | None]] = []
        self.stuck = 0

    async def call(
        self,
        work: Callable[[], Result],
        *,
        timeout_s: float,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Result:
        """The result of `work`, or its exception. Cancelled: `work` runs on, its result is lost.

        `settled` runs when the call ended or was given up, `ended` when it ended, late or not;
        both on the loop, each once, whatever became of the caller.

        Raises:
            VirtbusError: 503 `libvirt_stuck` when it takes longer than `timeout_s`.
        """
        call = Call(work, settled, ended)
        call.timer = self._loop.call_later(timeout_s, self._give_up, call, timeout_s)
        inbox = self._idle.pop() if self._idle else self._thread()
        inbox.put(call)
        result: Result = await call.answer
        return result

    def close(self) -> None:
        """End the idle threads; one that is stuck ends with the process."""
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()

    def _thread(self) -> "queue.SimpleQueue[Call | None]":
        inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), name=self._name, daemon=True).start()
        return inbox

    def _work(self, inbox: "queue.SimpleQueue[Call | None]") -> None:
        while (call := inbox.get()) is not None:
            result: Any = None
            error: Exception | None = None
            try:
                result = call.work()
            except Exception as problem:  # noqa: BLE001  raised again where it is awaited
                error = problem
            try:
                self._loop.call_soon_threadsafe(self._ended, inbox, call, result, error)
            except RuntimeError:
                return  # the loop is closed: the agent has ended

    def _ended(
        self,
        inbox: "queue.SimpleQueue[Call | None]",
        call: Call,
        result: object,
        error: Exception | None,
    ) -> None:
        self._settle(call)
        if call.ended is not None:
            call.ended()
        if not call.answer.done():
            if error is None:
                call.answer.set_result(result)
            else:
                call.answer.set_exception(error)
        if len(self._idle) < IDLE_THREADS:
            self._idle.append(inbox)
        else:
            inbox.put(None)

    def _settle(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.stuck:
            self.stuck -= 1
            log.warning("%s: a stuck call came back", self._name, extra={"code": "unstuck"})
        elif call.settled is not None:
            call.settled()

    def _give_up(self, call: Call, timeout_s: float) -> None:
        call.stuck = True
        self.stuck += 1
        log.error("%s: a call is stuck (%d)", self._name, self.stuck, extra={"code": "stuck"})
        if call.settled is not None:
            call.settled()
        if not call.answer.done():
            message = (
                f"a libvirt call took more than {timeout_s:.0f} s; "
                "see libvirtd's log, and restart it if it hangs (guests run on)"
            )
            call.answer.set_exception(VirtbusError(Code.UNAVAILABLE, "libvirt_stuck", message))
