"""Merges the streams of GetContainerEvents of both runtimes.

The proxy keeps no backlog of events: a slow client slows down the runtimes. Events may be lost
while a runtime is away. So the stream to a client ends when the runtime is back. The client then
lists the pods and calls again.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from virtbus.bus.runtime.tasks import background
from virtbus.criproxy.core import calls
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.runtime_client import CallFailedError
from virtbus.criproxy.runtimes import NO_LIST, NodeRuntime, Runtimes
from virtbus.schemas.errors import Code, VirtbusError

CLIENTS = 16
RETRY_S = 1.0
Told = bytes | CallFailedError | VirtbusError
"""An event, or the error that ends a stream."""
_VERSION = Call("Version", b"", None)


class EventStreams:
    """The open streams."""

    def __init__(self, runtimes: Runtimes) -> None:
        self._runtimes = runtimes
        self._open = 0

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield the events of both runtimes from now on.

        Raises:
            VirtbusError: 429 `too_many_streams`. 503 `events_lost`: a runtime was away.
            CallFailedError: a runtime does not offer events. Then kubelet reads lists instead.
        """
        if self._open >= CLIENTS:
            message = f"{CLIENTS} clients read events already; close one of their streams"
            raise VirtbusError(Code.EXHAUSTED, "too_many_streams", message)
        self._open += 1
        queue: asyncio.Queue[Told] = asyncio.Queue(1)
        try:
            async with background() as tasks:
                for one in self._runtimes:
                    tasks.start(_read(one, call, queue))
                while isinstance(told := await queue.get(), bytes):
                    yield told
        finally:
            self._open -= 1
        raise told


async def _read(runtime: NodeRuntime, call: Call, queue: "asyncio.Queue[Told]") -> None:
    """Pass on the events of one runtime, then the reason why no more events follow."""
    path = calls.PATHS[call.name]
    try:
        async with aclosing(runtime.client.stream(path, call.body, call.metadata)) as events:
            async for event in events:
                await queue.put(event)
    except CallFailedError as error:
        if error.code not in NO_LIST:
            await queue.put(error)
            return
    await _back(runtime)
    message = f"events of the runtime of {runtime.name} may be lost; list, then call again"
    await queue.put(VirtbusError(Code.UNAVAILABLE, "events_lost", message))


async def _back(runtime: NodeRuntime) -> None:
    while await runtime.told(_VERSION, NO_LIST) is None:  # noqa: ASYNC110  gRPC has no such event
        await asyncio.sleep(RETRY_S)
