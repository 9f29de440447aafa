"""Serves the agent's UNIX socket, for the container runtime of the same node and for root only.

A message is a 4-byte length (big-endian) and msgpack, as on netd's sockets.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from virtbus.bus.runtime.own_socket import close_to_others, own_path
from virtbus.bus.runtime.tasks import background
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 1024
READ_S = 5.0
HEADER_BYTES = 4


@asynccontextmanager
async def serving(
    path: Path, answer: Callable[[LocalEnd], Awaitable[LocalEnded]]
) -> AsyncIterator[None]:
    """Serve requests to end VMs while the context is open; one request for each connection.

    If a client disconnects, the agent still completes the end of the VM.
    """
    async with background() as tasks:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with suppress(OSError, EOFError):
                    await _serve(reader, writer, answer)
            finally:
                writer.close()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.start(connected(reader, writer))

        with own_path(path):
            server = await asyncio.start_unix_server(begin, str(path))
            close_to_others(path)
            try:
                yield
            finally:
                server.close()


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Callable[[LocalEnd], Awaitable[LocalEnded]],
) -> None:
    async with asyncio.timeout(READ_S):
        size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
        if size > MAX_FRAME_BYTES:
            return
        body = await reader.readexactly(size)
    try:
        told = await answer(read(LocalEnd, body))
    except VirtbusError as error:
        log.info("refused on the local socket: %s", error, extra={"code": error.reason})
        told = LocalEnded(error=error.body)
    data = encode(told)
    writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
    await writer.drain()
