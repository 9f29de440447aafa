"""Calls netd's admin socket. A message is a 4-byte length (big-endian) and msgpack."""

import asyncio
import struct
from pathlib import Path

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Arm, Armed
from virtbus.schemas.wire import encode, read

TIMEOUT_S = 3.0
MAX_FRAME_BYTES = 64 * 1024


class AdminSocket:
    """The `NetdAdmin` port."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def arm(self, arm: Arm) -> None:
        """Return once netd accepts vmwrapper for this VM's start.

        Raises:
            VirtbusError: netd's refusal, or 503 `netd_down`: netd does not answer in 3 s, or 500
                `bad_frame`: netd's answer is too large.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                armed = read(Armed, await self._exchange(encode(arm)))
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            message = f"netd does not answer on {self._path.name}; see `virtbus status`"
            raise VirtbusError(Code.UNAVAILABLE, "netd_down", message, after_ms=1000) from error
        if armed.error is not None:
            raise VirtbusError.of(armed.error)

    async def _exchange(self, body: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            writer.write(struct.pack(">I", len(body)) + body)
            await writer.drain()
            (size,) = struct.unpack(">I", await reader.readexactly(4))
            if size > MAX_FRAME_BYTES:
                raise VirtbusError(Code.INTERNAL, "bad_frame", "netd answered an oversize frame")
            return await reader.readexactly(size)
        finally:
            writer.close()
