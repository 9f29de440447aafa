"""Runs the work of operations on disks, one job for each id; each request may be repeated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ExportState

log = logging.getLogger(__name__)


@dataclass
class Job:
    """The work of one operation; `error` is its failure, which the next request gets."""

    step: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    final: bool = False
    """True from the final step on: a cancel comes too late."""
    error: VirtbusError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def state(self) -> ExportState:
        """Return the progress as the answer of a request."""
        return ExportState(
            state="working",
            step=self.step,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
        )


class OperationJobs:
    """The jobs that run, by the ids of their operations."""

    def __init__(self, group: asyncio.TaskGroup, at_once: int) -> None:
        self._group = group
        self._jobs: dict[str, Job] = {}
        self._slots = asyncio.Semaphore(at_once)

    @property
    def ids(self) -> frozenset[str]:
        """Return the ids of the operations with a job."""
        return frozenset(self._jobs)

    async def ensure(
        self,
        id_: str,
        done: Callable[[], Awaitable[ExportState | None]],
        work: Callable[[Job], Awaitable[None]],
    ) -> ExportState:
        """Return the progress or the result; start the job if there is neither.

        Raises:
            VirtbusError: the failure of the attempt before this request. The next request begins
                another.
        """
        if id_ not in self._jobs and (found := await done()) is not None:
            return found
        job = self._jobs.get(id_)
        if job is None:
            job = self._jobs[id_] = Job()
            job.task = self._group.create_task(self._run(id_, job, work))
        elif job.error is not None:
            del self._jobs[id_]
            raise job.error
        return job.state

    async def cancel(self, id_: str) -> ExportState | None:
        """End a job; return its progress if the cancel comes too late, None if there is no job."""
        job = self._jobs.get(id_)
        if job is not None and job.final and job.error is None:
            return job.state
        self._jobs.pop(id_, None)
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
        return None

    async def _run(self, id_: str, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            async with self._slots:
                await work(job)
        except VirtbusError as error:
            job.error = error
            extra = {"code": error.reason}
            log.warning("operation %s failed: %s", id_, error, extra=extra)
        except Exception:  # boundary: one operation's fault must not end the service
            log.exception("operation %s failed", id_, extra={"code": "internal"})
            job.error = VirtbusError(Code.INTERNAL, "internal", "it failed; see imaged's log")
        else:
            self._jobs.pop(id_, None)
