"""Keeps answers after they were passed on, so that no call waits until its answer is kept.

After each change of a sandbox or container, the proxy asks for the object's status. The last known
status is then never older than the change.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from virtbus.criproxy.core import calls
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.runtime_client import CallFailedError
from virtbus.criproxy.runtimes import Mark, NodeRuntime

log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]
QUEUED = 1024
SETTLE_S = 0.005
"""Pause before the proxy keeps an answer. gRPC sends the answer to the client meanwhile."""


class Memory:
    """The queue of answers to keep."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Work] = asyncio.Queue(QUEUED)
        self._lists: dict[tuple[str, str], tuple[bytes, Mark]] = {}
        self._kept: dict[tuple[str, str], tuple[bytes, Mark]] = {}
        self._digests: dict[tuple[str, str], tuple[int | None, Mark]] = {}

    async def run(self) -> None:
        while True:
            work = await self._queue.get()
            await asyncio.sleep(SETTLE_S)
            try:
                await work()
            except (messages.UnreadableError, CallFailedError) as error:
                log.warning("an answer is not kept: %s", error, extra={"code": "not_kept"})
            finally:
                self._queue.task_done()

    async def kept(self) -> None:
        await self._queue.join()

    def of_list(self, runtime: NodeRuntime, call: str, body: bytes, begun: Mark) -> None:
        """Keep a complete list. If several answers of the same list wait, only the last is kept."""
        key = (runtime.name, call)
        if self._kept.get(key) == (body, begun) and begun.quiet:
            return
        waiting = key in self._lists
        self._lists[key] = (body, begun)

        async def keep() -> None:
            last, mark = self._lists.pop(key)
            digest = None if call in calls.MEASURED else messages.digest(call, last)
            same = digest is not None and self._digests.get(key) == (digest, mark)
            if not same or not mark.quiet:
                await runtime.remember(call, messages.entries(call, last), mark)
            self._kept[key], self._digests[key] = (last, mark), (digest, mark)

        if not waiting and not self._put(keep):
            del self._lists[key]

    def of_whole(self, runtime: NodeRuntime, call: str, body: bytes) -> None:

        async def keep() -> None:
            entry = messages.whole(call, body)
            await runtime.last[call].replace({entry.key: entry})

        self._put(keep)

    def of_status(self, runtime: NodeRuntime, of: calls.Of, body: bytes) -> None:
        self._put(lambda: runtime.restate(of, body))

    def of_change(self, runtime: NodeRuntime, of: calls.Of, field: str, key: str) -> None:
        """Ask for the status of the changed sandbox or container, and keep it."""

        async def keep() -> None:
            asked = Call(calls.STATUS[of], messages.status_of(calls.STATUS[of], field, key), None)
            answer = await runtime.told(asked)
            if answer is not None:
                await runtime.restate(of, answer)

        self._put(keep)

    def _put(self, work: Work) -> bool:
        """Queue work; return False if the queue is full. The next list then has the lost state."""
        try:
            self._queue.put_nowait(work)
        except asyncio.QueueFull:
            log.warning("%d answers wait to be kept", QUEUED, extra={"code": "not_kept"})
            return False
        return True
