"""Calls that may wait for a disk, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DiskThreads:
    """A bounded set of threads, so that a slow disk delays neither heartbeats nor the bus."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """The result of `call(*args)`.

        Cancellation is delivered after the call has ended: the caller may then close its files
        knowing that no thread still writes to them. So keep each call short.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, call, *args)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if not future.cancelled():
                future.exception()  # retrieved: the cancellation is what the caller sees
            raise cancelled
        return future.result()

    def close(self) -> None:
        """Let the threads end; what they do now, they finish."""
        self._pool.shutdown(wait=False)
