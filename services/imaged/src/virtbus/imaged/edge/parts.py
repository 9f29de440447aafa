"""A part for as long as something is fetched into it, and whether it outlives that."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from virtbus.imaged.edge.diskthreads import DiskThreads
from virtbus.imaged.edge.part import Part
from virtbus.imaged.edge.store import Store
from virtbus.schemas.errors import Retry, VirtbusError


@asynccontextmanager
async def open_part(
    store: Store, threads: DiskThreads, key: str, abandoned: Callable[[], bool]
) -> AsyncIterator[Part]:
    """The part of `key`, for one user.

    What it holds is kept for another try where one may help, and for the next process where this
    one stops; nothing is kept of what is `abandoned`, done or refused.
    """
    part = await threads.run(store.part, key)
    keep = False
    try:
        yield part
    except VirtbusError as error:
        keep = error.body.retry is Retry.LATER and error.reason != "disk_full"
        raise
    except asyncio.CancelledError:
        keep = not abandoned()
        raise
    finally:
        await threads.run(_close, part, keep)


def _close(part: Part, keep: bool) -> None:
    part.close(keep=keep)
