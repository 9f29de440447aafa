"""Waits for the end of work in a thread, because a thread cannot be cancelled."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_end(future: "asyncio.Future[T]") -> T:
    """Return the result of a thread's `future`. A cancellation waits until the thread has ended.

    After a cancellation, the caller can safely close or remove the thread's files. Use this only
    for short work.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log the exception
        raise cancelled
    return future.result()
