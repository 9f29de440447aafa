"""Makes the image of a fetched file: decompresses it if needed, and checks its header."""

import contextlib
from collections.abc import AsyncIterator

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.clusters import check_clusters
from virtbus.imaged.core.decoding import is_compressed
from virtbus.imaged.core.header import inspect
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.qcow2 import ImageHeader
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.partial_downloads import open_part
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.unpacking import Unpacking
from virtbus.imaged.single_flight import Flight
from virtbus.schemas.image import ImageFormat

_MAGIC_BYTES = 16


class Contents:
    """The images in fetched files."""

    def __init__(self, store: ImageStore, threads: DiskThreads, limits: TransferLimits) -> None:
        self._store = store
        self._threads = threads
        self._limits = limits
        self._unpacking = Unpacking(limits, threads)

    @contextlib.asynccontextmanager
    async def of(
        self, flight: Flight, url: str, key: str, part: PartialDownload
    ) -> AsyncIterator[PartialDownload]:
        """Yield the part with the image: `part` itself, or a second one with its content.

        Raises:
            VirtbusError: the errors of `edge.unpacking`.
        """
        if not is_compressed(await self._threads.run(part.read_at, 0, _MAGIC_BYTES)):
            yield part
            return
        key = f"{key}\ncontent"
        async with open_part(self._store, self._threads, key, lambda: flight.abandoned) as content:
            await self._unpacking.unpack(url, part, content, flight.worked)
            yield content

    async def inspect(self, part: PartialDownload) -> ImageHeader:
        """Return the header of an image; the errors of `core.header` and `core.clusters`."""
        head, tail = await self._threads.run(part.head_and_tail)
        header = inspect(head, tail, part.offset, self._limits.max_virtual_bytes)
        if header.format is ImageFormat.QCOW2:
            fields = qcow2.read_fields(head)
            await self._threads.run(check_clusters, fields, part.offset, part.read_at)
        return header
