"""Waiting for work that a thread does, and that cannot be taken back."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_end(future: "asyncio.Future[T]") -> T:
    """The result of `future`; a cancellation is delivered only once the thread has ended.

    So who closes or removes the files then is not overtaken by a thread that still writes them.
    Keep each call short.
    """
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
