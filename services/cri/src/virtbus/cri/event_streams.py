"""Implements GetContainerEvents: each client gets the events that follow its call.

Each client has a queue of limited length, so a slow client delays no other client. A full queue
ends its stream. The slow client can list the pods, and call again.
"""

import asyncio
from collections.abc import AsyncIterator

from virtbus.bus.runtime.sources import Sources
from virtbus.cri.core import answers
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.events import events
from virtbus.cri.core.pod import Pod
from virtbus.schemas.errors import Code, VirtbusError

QUEUED = 1024
CLIENTS = 16


class EventStreams:
    """The open streams."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._queues: set[asyncio.Queue[Plain | None]] = set()

    def changed(self, before: Pod | None, after: Pod | None) -> None:
        if not self._queues:
            return
        for event in events(before, after):
            pod = after or before
            told = {
                "container_id": event.id,
                "container_event_type": event.kind,
                "created_at": self._sources.time_ns(),
                **(_status(pod, event.sandbox_id) if pod is not None else {}),
            }
            for queue in tuple(self._queues):
                self._queue(queue, told)

    def _queue(self, queue: "asyncio.Queue[Plain | None]", told: Plain) -> None:
        try:
            queue.put_nowait(told)
        except asyncio.QueueFull:
            self._queues.discard(queue)
            queue.get_nowait()
            queue.put_nowait(None)

    async def stream(self) -> AsyncIterator[Plain]:
        """Yield the events from now on.

        Raises:
            VirtbusError: 429 `too_many_streams`. 429 `behind`: the client reads too slowly.
        """
        if len(self._queues) >= CLIENTS:
            message = f"{CLIENTS} clients read events already; close one of their streams"
            raise VirtbusError(Code.EXHAUSTED, "too_many_streams", message)
        queue: asyncio.Queue[Plain | None] = asyncio.Queue(QUEUED)
        self._queues.add(queue)
        try:
            while (told := await queue.get()) is not None:
                yield told
        finally:
            self._queues.discard(queue)
        message = f"more than {QUEUED} events waited; list the pods, then call again"
        raise VirtbusError(Code.EXHAUSTED, "behind", message)


def _status(pod: Pod, sandbox_id: str) -> Plain:
    if all(one.id != sandbox_id for one in pod.sandboxes):
        return {}
    inside = [one for one in pod.containers if one.sandbox_id == sandbox_id]
    return {
        "pod_sandbox_status": answers.sandbox_status(pod, pod.sandbox(sandbox_id)),
        "containers_statuses": [answers.container_status(pod, one, "") for one in inside],
    }
