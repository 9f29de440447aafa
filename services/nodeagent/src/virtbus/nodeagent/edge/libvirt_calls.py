"""Blocking calls off the loop, with deadlines: a stuck one is left behind and replaced (F10)."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
STUCK_LIMIT = 4


class Lane:
    """A bounded set of threads for one kind of call; libvirt's calls release the GIL."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.stuck = 0

    async def call(self, work: Callable[[], Result], *, timeout_s: float) -> Result:
        """The result of `work` in a thread.

        Raises:
            VirtbusError: 503 `libvirt_stuck` when it takes longer than `timeout_s`; its thread
                is abandoned, and another takes its place while fewer than STUCK_LIMIT are.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except TimeoutError:
            self._abandon(future)
            message = (
                f"a libvirt call took more than {timeout_s:.0f} s; "
                "see libvirtd's log, and restart it if it hangs (guests run on)"
            )
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_stuck", message) from None

    def _abandon(self, future: "asyncio.Future[Result]") -> None:
        self.stuck += 1
        log.error("%s: a call is stuck (%d)", self._name, self.stuck, extra={"code": "stuck"})
        future.add_done_callback(self._came_back)
        if self.stuck <= STUCK_LIMIT:
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)

    def _came_back(self, future: "asyncio.Future[Result]") -> None:
        self.stuck -= 1
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not report it

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
