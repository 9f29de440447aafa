"""Runs blocking calls in threads, with time limits; a hanging thread is replaced (F10).

The executors of the standard library join their threads when the interpreter ends. With them, one
call that never returns would prevent a restart of the agent.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
STUCK_LIMIT = 4
"""If this many calls hang, the agent is unhealthy and refuses most calls (F10)."""
IDLE_THREADS = 4


@dataclass(slots=True)
class LibvirtCall:
    """One call in a thread. `Threads.call` explains `settled` and `ended`."""

    work: Callable[[], Any]
    settled: Callable[[], None] | None
    ended: Callable[[], None] | None
    answer: asyncio.Future[Any]
    timer: asyncio.TimerHandle | None = None
    stuck: bool = False


class Threads:
    """Runs each call in a daemon thread. Its attributes change only on the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._idle: list[queue.SimpleQueue[LibvirtCall | None]] = []
        self.stuck = 0

    async def call(
        self,
        work: Callable[[], Result],
        *,
        timeout_s: float,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Result:
        """Return the result of `work`, or raise its exception. A cancellation does not end `work`.

        `settled` runs when `work` ends, or after `timeout_s` if `work` takes longer. `ended` runs
        when `work` ends, however late. Both run on the loop, once, even if the caller is cancelled.

        Raises:
            VirtbusError: 503 `libvirt_stuck` if `work` takes longer than `timeout_s`.
        """
        call = LibvirtCall(work, settled, ended, self._loop.create_future())
        call.timer = self._loop.call_later(timeout_s, self._give_up, call, timeout_s)
        inbox = self._idle.pop() if self._idle else self._thread()
        inbox.put(call)
        result: Result = await call.answer
        return result

    def close(self) -> None:
        """End the idle threads. A hanging thread ends with the process."""
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()

    def _thread(self) -> "queue.SimpleQueue[LibvirtCall | None]":
        inbox: queue.SimpleQueue[LibvirtCall | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), name=self._name, daemon=True).start()
        return inbox

    def _work(self, inbox: "queue.SimpleQueue[LibvirtCall | None]") -> None:
        while (call := inbox.get()) is not None:
            result: Any = None
            error: Exception | None = None
            try:
                result = call.work()
            except Exception as problem:  # noqa: BLE001  raised again in the caller
                error = problem
            try:
                self._loop.call_soon_threadsafe(self._ended, inbox, call, result, error)
            except RuntimeError:
                return  # the loop is closed: the agent has ended

    def _ended(
        self,
        inbox: "queue.SimpleQueue[LibvirtCall | None]",
        call: LibvirtCall,
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

    def _settle(self, call: LibvirtCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.stuck:
            self.stuck -= 1
            log.warning("%s: a hanging call returned", self._name, extra={"code": "unstuck"})
        elif call.settled is not None:
            call.settled()

    def _give_up(self, call: LibvirtCall, timeout_s: float) -> None:
        call.stuck = True
        self.stuck += 1
        log.error("%s: a call hangs (%d)", self._name, self.stuck, extra={"code": "stuck"})
        if call.settled is not None:
            call.settled()
        if not call.answer.done():
            message = (
                f"a libvirt call took more than {timeout_s:.0f} s; "
                "see libvirtd's log, and restart it if it hangs (guests keep running)"
            )
            call.answer.set_exception(VirtbusError(Code.UNAVAILABLE, "libvirt_stuck", message))
