"""Runs blocking disk calls off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Thread
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


def in_daemon(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread of its own.

    Python waits at its exit for the threads of an executor. So work that hangs in an executor would
    prevent imaged from stopping.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        try:
            settle = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001  # raised in the awaiting task
            settle = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the process ends, and its loop is closed
            loop.call_soon_threadsafe(settle)

    Thread(target=body, name=name, daemon=True).start()
    return done
