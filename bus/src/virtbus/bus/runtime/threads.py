"""Waits for work in a thread that cannot be interrupted."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_end(future: "asyncio.Future[T]") -> T:
    """Return the result of `future`; delay a cancellation until the thread has ended.

    So a caller that then closes or removes files does not race with the thread. Keep each call
    short.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved: the caller sees the cancellation
        raise cancelled
    return future.result()
