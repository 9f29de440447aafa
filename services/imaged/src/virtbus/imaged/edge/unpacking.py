"""Decompresses a fetched image: gzip, xz or zstd, as its first bytes say (ADR 0041)."""

from collections.abc import Callable, Iterator

from virtbus.imaged.core.archive import DamagedError
from virtbus.imaged.core.decoding import decoded
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.sources import shown
from virtbus.imaged.edge.decoding_work import DecodingWork, chunks
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.schemas.errors import Code, VirtbusError


class Unpacking:
    """Decompresses parts, within the limits of a transfer."""

    def __init__(self, limits: TransferLimits, threads: DiskThreads) -> None:
        self._limits = limits
        self._threads = threads

    async def unpack(
        self,
        url: str,
        packed: PartialDownload,
        into: PartialDownload,
        worked: Callable[[int], None],
    ) -> None:
        """Write the content of `packed` to `into`; `worked` gets the number of decoded bytes.

        Only one layer of compression is removed. After a cancellation, `into` has the first bytes
        of the content.

        Raises:
            VirtbusError: 422 `compressed_invalid`. 503 `image_quota`, `disk_full`, `store_error`.
        """
        await self._threads.run(into.restart, None)
        work = DecodingWork(self._limits, worked)
        steps = self._steps(packed, into, work)
        try:
            more = True
            while more:
                more = await self._threads.run(work.run_steps, steps)
                work.check()
        except DamagedError as error:
            raise VirtbusError(
                Code.UNSUPPORTED,
                "compressed_invalid",
                f"the compressed image {shown(url)} cannot be used: {error}",
            ) from None

    def _steps(
        self, packed: PartialDownload, into: PartialDownload, work: DecodingWork
    ) -> Iterator[None]:
        pieces = decoded(chunks(packed), self._limits.max_bytes, self._limits.max_expansion)
        for piece in work.counted(pieces):
            into.write(piece)
            yield
