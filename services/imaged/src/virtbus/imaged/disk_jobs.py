"""Runs the long work of operations on disks: one job for each operation."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState

log = logging.getLogger(__name__)

CONVERSIONS_AT_ONCE = 2
"""Number of conversions at a time: each takes one CPU and the disk's bandwidth."""


@dataclass
class Job:
    """The work of one operation; `error` is its failure, until a request has reported it."""

    step: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    final: bool = False
    """True from the final step on: a cancel comes too late."""
    error: VirtbusError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def state(self) -> WorkState:
        return WorkState(
            state="working",
            step=self.step,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
        )


class DiskJobs:
    """The jobs of a node by the ids of their operations. A job that succeeded is forgotten."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._jobs: dict[str, Job] = {}
        self.slots = asyncio.Semaphore(CONVERSIONS_AT_ONCE)
        """Each conversion takes a slot before it locks disks, because mixed orders can deadlock."""

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._jobs)

    async def ensure(
        self,
        id_: str,
        uid: str,
        done: Callable[[], Awaitable[WorkState | None]],
        work: Callable[[Job], Awaitable[None]],
        *,
        soon_s: float = 0.0,
    ) -> WorkState:
        """Return the operation's result or progress; begin its work if there is neither.

        Wait at most `soon_s` for the end of the work.

        Raises:
            VirtbusError: the failure of an earlier attempt, or of this attempt within `soon_s`. The
                next request begins another attempt.
        """
        if id_ not in self._jobs and (found := await done()) is not None:
            return found
        job = self._jobs.get(id_) or self.begin(id_, uid, work)
        if soon_s and job.task is not None and not job.task.done():
            await asyncio.wait({job.task}, timeout=soon_s)
            if id_ not in self._jobs and (found := await done()) is not None:
                return found
        if job.error is not None:
            self._forget(id_, job)
            raise job.error
        return job.state

    def begin(self, id_: str, uid: str, work: Callable[[Job], Awaitable[None]]) -> Job:
        job = self._jobs[id_] = Job()
        job.task = self._group.create_task(self._run(id_, uid, job, work))
        return job

    async def end(self, id_: str) -> WorkState | None:
        """Cancel a job; return its progress if the cancel comes too late, otherwise None.

        A cancelled job has ended on return.
        """
        job = self._jobs.get(id_)
        if job is not None and job.final and job.error is None:
            return job.state
        if job is not None and job.task is not None:
            self._forget(id_, job)
            job.task.cancel()
            await asyncio.wait({job.task})
        return None

    async def _run(
        self, id_: str, uid: str, job: Job, work: Callable[[Job], Awaitable[None]]
    ) -> None:
        try:
            await work(job)
        except VirtbusError as error:
            job.error = error
            extra = {"code": error.reason, "uid": uid}
            log.warning("operation %s failed: %s", id_, error, extra=extra)
        except Exception:  # boundary: one operation's fault must not end the service
            log.exception("an operation failed", extra={"code": "internal", "uid": uid})
            job.error = VirtbusError(Code.INTERNAL, "internal", "it failed; see imaged's log")
        else:
            self._forget(id_, job)

    def _forget(self, id_: str, job: Job) -> None:
        """Remove a job; a newer job of the same operation stays."""
        if self._jobs.get(id_) is job:
            del self._jobs[id_]
