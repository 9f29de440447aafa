"""Writes an HTTP response body to a partial download (part), with limits on size and rate."""

import asyncio
import contextlib
from typing import Protocol

import aiohttp

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.local_files import OnBytes, too_large
from virtbus.imaged.edge.partial_download import CHUNK_BYTES, PartialDownload
from virtbus.imaged.edge.transient import TransientError
from virtbus.schemas.errors import VirtbusError


class Content(Protocol):
    """The method of aiohttp's StreamReader that `Body` uses."""

    async def readany(self) -> bytes: ...


class Body:
    """Reads one body. Bytes before a failure stay in the part, so that the download can resume."""

    def __init__(
        self, limits: TransferLimits, threads: DiskThreads, url: str, part: PartialDownload
    ) -> None:
        self._limits = limits
        self._threads = threads
        self._url = url
        self._part = part
        self._buffer = bytearray()
        self._window_bytes = 0
        self._window_end_s = 0.0

    async def receive(self, content: Content, total: int | None, on_bytes: OnBytes) -> None:
        """Read all of `content`; `total` is the whole file's size, None if unknown.

        Raises:
            TransientError: the body ended early or came too slowly, or the connection broke.
            VirtbusError: 413 `image_too_large`. 503 `image_quota`, `disk_full`, `store_error`.
        """
        most = self._limits.max_bytes if total is None else total
        self._next_window()
        try:
            while data := await self._read(content):
                self._buffer += data
                if self._part.offset + len(self._buffer) > most:
                    raise too_large(self._url, most, most)
                if len(self._buffer) >= CHUNK_BYTES:
                    await self._flush()
                on_bytes(self._part.offset + len(self._buffer), total)
        except (aiohttp.ClientError, TransientError):
            await self._flush()
            raise
        except asyncio.CancelledError:
            # A pull may be cancelled to give its slot to another pull. It resumes after the flushed
            # bytes, even if a slow server sent less than a chunk.
            with contextlib.suppress(VirtbusError):
                await self._flush()
            raise
        await self._flush()
        if total is not None and self._part.offset != total:
            raise TransientError(f"the body ended after {self._part.offset} of {total} bytes")

    async def _read(self, content: Content) -> bytes:
        while True:
            try:
                async with asyncio.timeout_at(self._window_end_s):
                    data = await content.readany()
            except TimeoutError:
                self._check_rate()
                continue
            self._window_bytes += len(data)
            if data and asyncio.get_running_loop().time() >= self._window_end_s:
                self._check_rate()
            return data

    def _check_rate(self) -> None:
        least = self._limits.min_rate_bytes_s * self._limits.rate_window_s
        if self._window_bytes < least:
            raise TransientError(
                f"{self._window_bytes} bytes in {self._limits.rate_window_s:g} s is too slow"
            )
        self._next_window()

    def _next_window(self) -> None:
        self._window_bytes = 0
        self._window_end_s = asyncio.get_running_loop().time() + self._limits.rate_window_s

    async def _flush(self) -> None:
        """Write and hash the buffer; the time for this does not count in the server's rate."""
        if not self._buffer:
            return
        loop = asyncio.get_running_loop()
        chunk = bytes(self._buffer)
        self._buffer.clear()
        began_s = loop.time()
        await self._threads.run(self._part.write, chunk)
        self._window_end_s += loop.time() - began_s
