"""Shares one transfer among concurrent requests for the same image (IMG-20)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from virtbus.schemas.errors import Code, VirtbusError

T = TypeVar("T")
Listener = Callable[[int, int | None], Awaitable[None]]
"""Called with (bytes done, total bytes if known), at most 5 times a second."""

PROGRESS_INTERVAL_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asker:
    """One request for an image, with a listener for its progress.

    `uid` is that of a VM or a pull's job. The trace of a transfer has the `uid` of its first asker.
    The pull slot counts for `namespace`, which is empty for the operator's pulls. `pull_secret` is
    the VM's own login for a registry, or the query of its URL.
    """

    listener: Listener | None = None
    uid: str = ""
    namespace: str = ""
    pull_secret: str = field(default="", repr=False)


class Flight:
    """The state that a transfer shares with its requests."""

    def __init__(self) -> None:
        self.askers: list[Asker] = []
        self.moved_bytes = 0
        """Bytes received, copied or decoded, in all attempts."""
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.stopping = False
        self.ended = False
        """True if the image was deleted meanwhile."""

    @property
    def abandoned(self) -> bool:
        """Return True if the image was deleted, or if no request is left and imaged runs on."""
        return self.ended or (not self.askers and not self.stopping)

    @property
    def namespaces(self) -> frozenset[str]:
        return frozenset(asker.namespace for asker in self.askers)

    def on_bytes(self, done_bytes: int, total_bytes: int | None) -> None:
        """Record the progress; listeners get it at their own pace."""
        self.moved_bytes += max(0, done_bytes - self.done_bytes)
        self.done_bytes, self.total_bytes = done_bytes, total_bytes

    def worked(self, more_bytes: int) -> None:
        """Record the processing of bytes that are already local, for example by decompression."""
        self.moved_bytes += more_bytes

    async def _tell(self) -> None:
        listeners = [asker.listener for asker in self.askers if asker.listener is not None]
        for listener in listeners:
            await listener(self.done_bytes, self.total_bytes)

    async def report(self) -> None:
        """Report new progress to the listeners at intervals, and once more on cancellation.

        The end of an abandoned transfer is not reported.
        """
        sent: tuple[int, int | None] = (-1, None)
        try:
            while True:
                if sent != (self.done_bytes, self.total_bytes):
                    sent = (self.done_bytes, self.total_bytes)
                    await self._tell()
                await asyncio.sleep(PROGRESS_INTERVAL_S)
        finally:
            if self.done_bytes and not self.abandoned:
                await self._tell()


class Flights(Generic[T]):
    """Runs one task per key, for all its requests; ends the task when no request is left."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._flying: dict[str, tuple[Flight, asyncio.Task[None], asyncio.Future[T]]] = {}

    async def join(self, key: str, work: Callable[[Flight], Awaitable[T]], asker: Asker) -> T:
        """Return the result of `work`, or of the task that already runs under `key`.

        Raises the errors of the work. Cancelling one request does not affect other requests.
        """
        if key not in self._flying:
            flight = Flight()
            result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            task = self._group.create_task(self._fly(key, flight, work, result))
            self._flying[key] = (flight, task, result)
        flight, task, result = self._flying[key]
        flight.askers.append(asker)
        try:
            return await asyncio.shield(result)
        finally:
            flight.askers.remove(asker)
            if not flight.askers and not result.done():
                # A later request starts a new task, whose work waits until this task has ended.
                if self._flying.get(key, (None,))[0] is flight:
                    del self._flying[key]
                task.cancel()

    def end(self, key: str, error: VirtbusError) -> None:
        """End the task under `key`, if there is one; its requests get the error."""
        if key not in self._flying:
            return
        flight, task, result = self._flying.pop(key)
        flight.ended = True
        if not result.done():
            result.set_exception(error)
            result.exception()
        task.cancel()

    def stop(self) -> None:
        """Record that the service stops: cancelled tasks keep their bytes for the next start."""
        for flight, _, _ in self._flying.values():
            flight.stopping = True

    async def _fly(
        self,
        key: str,
        flight: Flight,
        work: Callable[[Flight], Awaitable[T]],
        result: asyncio.Future[T],
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                reporter = group.create_task(flight.report())
                try:
                    value = await work(flight)
                finally:
                    reporter.cancel()
            if not flight.ended:
                result.set_result(value)
        except ExceptionGroup as errors:
            self._fail(result, errors)
        finally:
            if self._flying.get(key, (None,))[0] is flight:
                del self._flying[key]
            result.cancel()

    def _fail(self, result: asyncio.Future[T], errors: ExceptionGroup[Exception]) -> None:
        refused, others = errors.split(VirtbusError)
        if others is not None:
            log.error("fetching an image failed", exc_info=others, extra={"code": "pull_failed"})
        first = refused.exceptions[0] if refused is not None else None
        if not isinstance(first, VirtbusError):
            first = VirtbusError(
                Code.INTERNAL, "internal", "fetching the image failed; see imaged's log"
            )
        if not result.done():
            result.set_exception(first)
            result.exception()  # avoids asyncio's warning if no request waits any more
