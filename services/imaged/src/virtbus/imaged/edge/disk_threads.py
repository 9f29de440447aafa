"""Runs blocking disk calls off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from virtbus.bus.runtime.threads import to_end

T = TypeVar("T")


class DiskThreads:
    """A bounded thread pool, so that a slow disk delays neither heartbeats nor the bus."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Return the result of `call(*args)`.

        A cancellation waits until `call` returns, so `call` must be short.
        """
        return await to_end(asyncio.get_running_loop().run_in_executor(self._pool, call, *args))

    def close(self) -> None:
        """Let the threads finish their work and end."""
        self._pool.shutdown(wait=False)
