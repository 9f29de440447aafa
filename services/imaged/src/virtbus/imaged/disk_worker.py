"""Ensures each VM's disks for as long as its record exists."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from virtbus.bus.client.tracing import SpanFactory
from virtbus.bus.runtime.backoff import delays
from virtbus.imaged.disks import Disks
from virtbus.imaged.reporter import DiskReporter
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


@dataclass(slots=True)
class _Job:
    """One VM in progress. `outcome` is that of the current or next attempt.

    `failed` is the previous attempt's error, until the next begins.
    """

    record: VmRecord
    outcome: "asyncio.Future[ImageReady]"
    task: "asyncio.Task[None] | None" = None
    failed: ImageReady | None = None
    again: asyncio.Event = field(default_factory=asyncio.Event)
    logins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The VM's own logins, for as long as its disks are in work."""

    @property
    def for_good(self) -> bool:
        """Return True if only a request triggers another attempt."""
        error = self.failed.error if self.failed is not None else None
        return error is not None and error.retry is Retry.NEVER

    @property
    def age(self) -> tuple[int, int]:
        return self.record.epoch, self.record.generation


class DiskWorker:
    """Serial per VM, parallel across VMs; temporary failures are retried with growing delays.

    A job lives from `want` until its disks exist, or `drop`.
    """

    def __init__(
        self, group: asyncio.TaskGroup, disks: Disks, facts: DiskReporter, span: SpanFactory
    ) -> None:
        self._group = group
        self._disks = disks
        self._facts = facts
        self._span = span
        self._jobs: dict[str, _Job] = {}
        self.listed: set[str] = set()
        """The uids with a record on the bus that is not ending."""
        self.refs: dict[str, frozenset[str]] = {}
        """The images in those records, by uid."""
        self.synced = False
        """True once `refs` covers a complete list: before, other images may be in use as well."""

    def want(self, record: VmRecord, logins: Mapping[str, str] | None = None) -> None:
        """Ensure the record's disks now; a newer record replaces the attempt of an older one."""
        job = self._jobs.get(record.uid)
        age = record.epoch, record.generation
        if job is not None and age < job.age:
            return
        if job is not None and age == job.age:
            job.logins = logins or job.logins
            job.again.set()
            return
        if job is not None:
            self._cancel(job)
        job = _Job(record, asyncio.get_running_loop().create_future(), logins=logins or {})
        self._jobs[record.uid] = job
        job.task = self._group.create_task(self._run(job))

    async def ensure(self, record: VmRecord, logins: Mapping[str, str] | None = None) -> ImageReady:
        """Return the outcome for this record: of the current attempt, or the last failed one.

        A permanent failure is tried again, because its cause may have been repaired. Never raises a
        VirtbusError: it is in the outcome.
        """
        job = self._jobs.get(record.uid)
        age = record.epoch, record.generation
        if job is not None and job.age == age and job.failed is not None and not job.for_good:
            return job.failed
        if job is not None and age < job.age:
            error = VirtbusError(Code.CONFLICT, "stale_epoch", "a newer record is in work")
            return _refused(record, error)
        self.want(record, logins)
        return await asyncio.shield(self._jobs[record.uid].outcome)

    def drop(self, uid: str, *, up_to_epoch: int | None = None) -> None:
        """Stop working for a VM: its record is gone, or about to end."""
        if up_to_epoch is None:
            self.refs.pop(uid, None)
        job = self._jobs.get(uid)
        if job is None or (up_to_epoch is not None and job.record.epoch > up_to_epoch):
            return
        del self._jobs[uid]
        self._cancel(job)

    def keep_listed(self) -> None:
        """Stop working for all VMs that the complete list does not contain."""
        for uid in (set(self._jobs) | set(self.refs)) - self.listed:
            self.drop(uid)
        self.synced = True

    def _cancel(self, job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()
        if not job.outcome.done():
            error = VirtbusError(
                Code.UNAVAILABLE, "record_changed", "the record changed; ask with the new one"
            )
            job.outcome.set_result(_refused(job.record, error))

    async def _run(self, job: _Job) -> None:
        pauses = delays(FIRST_RETRY_S, LAST_RETRY_S)
        attempt = 0
        while True:
            attempt += 1
            ready = await self._attempt(job, attempt)
            await self._facts.ready(ready)
            if not job.outcome.done():
                job.outcome.set_result(ready)
            if ready.error is None:
                if self._jobs.get(job.record.uid) is job:
                    del self._jobs[job.record.uid]
                return
            job.failed = ready
            job.outcome = asyncio.get_running_loop().create_future()
            job.again.clear()
            await _pause(job, None if job.for_good else next(pauses))
            job.failed = None

    async def _attempt(self, job: _Job, attempt: int) -> ImageReady:
        record = job.record
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            with self._span("virtbus ensure image", uid=record.uid, parent=record.traceparent):
                listener = self._facts.listener(record)
                done = await self._disks.ensure(record, listener, job.logins)
        except VirtbusError as error:
            log.warning("%s", error, extra={"code": error.reason, "uid": record.uid})
            return self._failed(record, error, attempt)
        except Exception:  # boundary: one VM's fault must not end the others' work
            log.exception("ensuring disks failed", extra={"code": "internal", "uid": record.uid})
            message = "imaged failed to make the disks; see its log"
            return self._failed(record, VirtbusError(Code.INTERNAL, "internal", message), attempt)
        if done.made:
            self._facts.made(record, done.ready, (loop.time() - began_s) * 1000)
        return done.ready

    def _failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> ImageReady:
        self._facts.failed(record, error, attempt)
        return _refused(record, error)


async def _pause(job: _Job, longest_s: float | None) -> None:
    """Wait until it is wanted again, or for `longest_s` (None: without limit)."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await job.again.wait()


def _refused(record: VmRecord, error: VirtbusError) -> ImageReady:
    return ImageReady(
        uid=record.uid, epoch=record.epoch, generation=record.generation, error=error.body
    )
