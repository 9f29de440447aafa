"""Opens a partial download for one transfer, and keeps or removes its bytes afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.errors import Retry, VirtbusError


@asynccontextmanager
async def open_part(
    store: ImageStore, threads: DiskThreads, key: str, abandoned: Callable[[], bool]
) -> AsyncIterator[PartialDownload]:
    """Open the part of `key` for one user.

    The part's bytes are kept if a later attempt may succeed, or if the service stops. The bytes are
    removed if the transfer is done, refused, out of space, or cancelled while `abandoned()` is
    True.
    """
    opened: list[PartialDownload] = []  # a cancelled `run` opens the part but returns nothing
    keep = False
    try:
        await threads.run(lambda: opened.append(store.part(key)))
        yield opened[0]
    except VirtbusError as error:
        full = error.reason in {"disk_full", "image_quota"}
        keep = error.body.retry is Retry.LATER and not full
        raise
    except asyncio.CancelledError:
        keep = not abandoned()
        raise
    finally:
        for part in opened:
            await threads.run(partial(part.close, keep=keep))
