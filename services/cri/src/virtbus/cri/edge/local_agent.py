"""Asks the agent of this node over its UNIX socket to end a guest, while the bus is away."""

import asyncio
from pathlib import Path

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.wire import encode, read

MAX_FRAME_BYTES = 64 * 1024
END_S = 30.0
"""Maximum time between the end of a guest's grace and the agent's answer."""
HEADER_BYTES = 4


class LocalAgent:
    """The agent's socket at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def end(self, want: LocalEnd) -> LocalEnded:
        """Make the agent end the guest; return the agent's answer after the guest's end.

        No error has the code 404, because kubelet would take the container for ended.

        Raises:
            VirtbusError: 503 `agent_away`: the agent does not answer. 503 `agent_refused`: the
                agent answered with an error. 504 `stop_slow`: the guest has not ended in time.
        """
        try:
            async with asyncio.timeout(want.grace_s + END_S):
                answer = read(LocalEnded, await self._exchange(encode(want)))
        except TimeoutError as error:
            message = f"the agent has not ended the guest {END_S:g} s after its grace"
            raise VirtbusError(Code.DEADLINE, "stop_slow", message) from error
        except (OSError, EOFError) as error:
            message = f"the bus is away, and the agent does not answer on {self._path.name}"
            raise VirtbusError(Code.UNAVAILABLE, "agent_away", message) from error
        if answer.error is not None:
            message = f"the bus is away, and the node's agent refuses: {answer.error.message}"
            raise VirtbusError(Code.UNAVAILABLE, "agent_refused", message)
        return answer

    async def _exchange(self, body: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
            if size > MAX_FRAME_BYTES:
                raise ConnectionResetError("an oversize answer")
            return await reader.readexactly(size)
        finally:
            writer.close()
