"""Serves the files of exports over HTTP or HTTPS, to clients that have a link (ADR 0062).

Each connection has one request and its own slot, so a stalled reader does not delay other readers.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable

from virtbus.bus.client.accept_loop import accept
from virtbus.bus.client.fair_shares import FairShares
from virtbus.imaged.core import download_requests as requests
from virtbus.imaged.core.limits import DownloadLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_files import ExportFiles, OpenedExport
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
TEXTS = {
    400: "this server has only files of exports; virtbus export link makes a link\n",
    403: "this link is not valid; virtbus export link makes another\n",
    410: "this link has expired; virtbus export link makes another\n",
}


class DownloadServer:
    """The HTTP server of a node."""

    def __init__(
        self,
        files: ExportFiles,
        threads: DiskThreads,
        limits: DownloadLimits,
        now_ns: Callable[[], int],
    ) -> None:
        self._files = files
        self._threads = threads
        self._limits = limits
        self._now_ns = now_ns
        self._shares = FairShares(limits.at_once)
        self._next_s = 0.0
        """The time from which the next bytes may be sent."""
        self.port = 0
        """The port on which the server listens; 0 before it listens."""
        self._told = ""
        """The last logged problem of the certificate; empty if it can be read."""

    async def run(self) -> None:
        """Serve until cancelled.

        If the server cannot listen, it retries: the host may get the address later.
        """
        with contextlib.suppress(OSError):  # `_context` logs it
            await self._threads.run(self._context)
        while True:
            try:
                listener = self._listen()
            except OSError as error:
                extra = {"code": "downloads_off"}
                log.warning("no downloads: cannot listen: %s", error, extra=extra)
                await asyncio.sleep(self._limits.listen_again_s)
                continue
            with listener:
                self.port = listener.getsockname()[1]
                await accept(listener, self._shares, self._serve)

    def _listen(self) -> socket.socket:
        address, port = self._limits.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family)
        listener.setblocking(False)
        return listener

    async def _serve(self, connection: socket.socket, source: str) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._limits.head_s):
                reader, writer = await self._streams(connection)
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(head, writer)
            writer.close()
            async with asyncio.timeout(self._limits.stall_s):
                await writer.wait_closed()
            writer = None  # asyncio's transport cannot be aborted once it has sent all and closed
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone or slow, or sends no HTTP, or the certificate is unreadable
        finally:
            self._shares.release(source)
            if writer is not None:
                writer.transport.abort()
            connection.close()

    async def _streams(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        context = await self._threads.run(self._context)
        reader = asyncio.StreamReader(requests.HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        transport.set_write_buffer_limits(high=CHUNK_BYTES)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _context(self) -> ssl.SSLContext | None:
        """Return a TLS context from the certificate's current files; None for plain HTTP.

        Raises:
            OSError: the files cannot be read. The first such error is logged.
        """
        if self._limits.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._limits.certificate)
        except OSError as error:
            certificate, key = self._limits.certificate
            why = f"cannot read the certificate {certificate} with the key {key}: {error}"
            if why != self._told:
                log.warning("no downloads: %s", why, extra={"code": "downloads_off"})
            self._told = why
            raise
        self._told = ""
        return context

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        want = requests.asked(head)
        if want is None:
            return _refuse(writer, 400)
        try:
            opened = await self._threads.run(self._files.opened, want.export, want.name)
        except VirtbusError as error:
            log.warning("cannot read an export: %s", error, extra={"code": error.reason})
            opened = None
        key = opened.key if opened is not None else b""
        status = requests.refusal(want, key, self._now_ns() / 1e9)
        if opened is None:
            return _refuse(writer, 403)
        try:
            if status:
                return _refuse(writer, status)
            await self._send(want, opened, writer)
        finally:
            os.close(opened.descriptor)

    async def _send(
        self, want: requests.Asked, opened: OpenedExport, writer: asyncio.StreamWriter
    ) -> None:
        size, digest = opened.result.size_bytes, opened.result.digest
        found = requests.span(want, size, requests.etag(digest))
        writer.write(requests.file_head(found, size, digest))
        at = found.start
        while want.body and at < found.end:
            data = await self._threads.run(opened.read, at, min(CHUNK_BYTES, found.end - at))
            if not data:
                writer.transport.abort()  # the export was removed
                return
            await self._turn(len(data))
            writer.write(data)
            async with asyncio.timeout(self._limits.stall_s):
                await writer.drain()
            at += len(data)
        extra = {"code": "export_downloaded"}
        log.info("export %s: bytes %d to %d sent", want.export, found.start, at, extra=extra)

    async def _turn(self, count: int) -> None:
        """Wait until `count` more bytes are within the rate that all downloads share."""
        if not self._limits.bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + count / self._limits.bytes_per_s
        await asyncio.sleep(begin_s - now_s)


def _refuse(writer: asyncio.StreamWriter, status: int) -> None:
    text = TEXTS[status].encode("ascii")
    fields = {"Content-Type": "text/plain; charset=us-ascii", "Content-Length": str(len(text))}
    writer.write(requests.head(status, fields) + text)
