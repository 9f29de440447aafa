"""Waits for the end of work in a thread, because a thread cannot be interrupted."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_end(future: "asyncio.Future[T]") -> T:
    """Return the result of a thread's `future`; delay a cancellation until the thread has ended.

    So the caller can then close or remove files that the thread used. Use it only for short work.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # mark it as retrieved, so that asyncio does not log it
        raise cancelled
    return future.result()
