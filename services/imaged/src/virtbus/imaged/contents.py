"""Makes an image from a fetched file: decompresses and converts the content, and checks it."""

import contextlib
from collections.abc import AsyncIterator

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.clusters import check_clusters
from virtbus.imaged.core.decoding import is_compressed
from virtbus.imaged.core.foreign import Foreign, judge
from virtbus.imaged.core.formats import claims
from virtbus.imaged.core.header import check_virtual_size, inspect
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.qcow2 import ImageHeader
from virtbus.imaged.edge.conversion import Conversions
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
        self._conversions = Conversions(limits, threads)

    @contextlib.asynccontextmanager
    async def of(
        self, flight: Flight, url: str, key: str, part: PartialDownload
    ) -> AsyncIterator[PartialDownload]:
        """Yield the part with the image: `part`, or a new part with the content made from `part`.

        Raises:
            VirtbusError: 413 `virtual_size_too_large`. The errors of `edge.unpacking`,
                `core.foreign` and `edge.conversion`.
        """
        async with contextlib.AsyncExitStack() as parts:
            if is_compressed(await self._threads.run(part.read_at, 0, _MAGIC_BYTES)):
                packed, part = part, await parts.enter_async_context(self._more(flight, key, "u"))
                await self._unpacking.unpack(url, packed, part, flight.worked)
            foreign = await self._threads.run(self._judged, part)
            if foreign is not None:
                whole = await parts.enter_async_context(self._more(flight, key, "c"))
                await self._conversions.convert(url, foreign, (part, whole), flight.worked)
                part = whole
            yield part

    def _more(
        self, flight: Flight, key: str, which: str
    ) -> contextlib.AbstractAsyncContextManager[PartialDownload]:
        """Open another part for the same image. No later pull continues this part."""
        return open_part(self._store, self._threads, f"{key}\n{which}", lambda: flight.abandoned)

    def _judged(self, part: PartialDownload) -> Foreign | None:
        foreign = judge(claims(*part.head_and_tail()), part.offset, part.read_at)
        if foreign is not None:
            check_virtual_size(foreign.virtual_size_bytes, self._limits.max_virtual_bytes)
        return foreign

    async def inspect(self, part: PartialDownload) -> ImageHeader:
        """Return the header of an image; raises the errors of `core.header` and `core.clusters`."""
        head, tail = await self._threads.run(part.head_and_tail)
        header = inspect(head, tail, part.offset, self._limits.max_virtual_bytes)
        if header.format is ImageFormat.QCOW2:
            fields = qcow2.read_fields(head)
            await self._threads.run(check_clusters, fields, part.offset, part.read_at)
        return header
