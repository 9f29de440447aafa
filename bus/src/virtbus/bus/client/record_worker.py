"""Runs the step of imaged or netd for each VM whose record is on this node."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from virtbus.bus.client.late_records import LateRecords
from virtbus.bus.client.ports import Entry, EntryKind, Watch, WatchMark
from virtbus.bus.client.step_reporter import StepReporter
from virtbus.bus.client.tracing import SpanFactory
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.ids import is_id
from virtbus.schemas.node_rpc import ANY_EPOCH, ImageReady, NetReady, Release
from virtbus.schemas.records import of_node_group, of_operation, read_record
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import valid_uid

Ready = TypeVar("Ready", bound=ImageReady | NetReady)
log = logging.getLogger(__name__)

LAST_RETRY_S = 60.0
RELIST_S = 300.0
ANSWERED_S = 1.0
"""An outcome within this time surely reaches the agent as the answer to its request. A later
outcome is also published."""
NO_LOGINS: Mapping[str, str] = MappingProxyType({})
NO_PART = frozenset({"powered", "power_epoch", "stop_grace_s", "restart_epoch"})
NO_PART |= {"paused", "pause_epoch", "requests", "lease", "reserved", "traceparent", "signature"}
"""Fields of a record that change neither a VM's disks nor its network. So a start, a stop or a
pause runs no step, until the agent requests the step."""
PARTS = tuple(VmRecord.model_fields.keys() - NO_PART - {"spec"})  # `spec_hash` covers the spec


@dataclass(frozen=True, slots=True)
class Ensured(Generic[Ready]):
    """The outcome of a step. `made` describes new resources for an event; None if all existed."""

    ready: Ready
    made: Mapping[str, str] | None


class Step(Protocol[Ready]):
    """One service's part of a VM's creation, for example netd's network."""

    name: str
    """A verb phrase that follows "failed to" in logs."""
    span: str
    first_retry_s: float
    interrupts: bool
    """If True, a newer record cancels a running attempt. If False, the newer record waits."""

    def follows(self, record: VmRecord) -> bool:
        """Note a record from the bus; return True if the step is needed now."""

    def forgets(self, uid: str) -> None:
        """Drop the notes of `follows`: the record is gone, or its VM is being deleted."""

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> Ensured[Ready]:
        """Do the step; raise VirtbusError on failure. Repeating and cancelling are safe."""

    def refusal(self, record: VmRecord, error: VirtbusError) -> Ready:
        """Return the outcome that reports `error`."""


@dataclass(slots=True)
class _Job(Generic[Ready]):
    """The work for one VM. `outcome` gets the result of the current or next attempt.

    `failed` is the last attempt's result if it failed, until the next attempt begins.
    """

    record: VmRecord
    outcome: "asyncio.Future[Ready]"
    logins: Mapping[str, str] = field(repr=False)
    """The VM's own registry logins. They are kept only while the job exists."""
    task: "asyncio.Task[None] | None" = None
    failed: Ready | None = None
    askers: int = 0
    again: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self) -> Ready:
        """Return the outcome for a request. The job survives a cancellation of the request."""
        self.askers += 1
        try:
            return await asyncio.shield(self.outcome)
        finally:
            self.askers -= 1

    @property
    def for_good(self) -> bool:
        """Return True after a permanent failure, which only a request or a new record retries."""
        error = self.failed.error if self.failed is not None else None
        return error is not None and error.retry is Retry.NEVER


class RecordWorker(Generic[Ready]):
    """Runs a step for many VMs: one attempt at a time per VM, VMs in parallel.

    Temporary failures are retried with growing delays. A job exists from `want` until its step has
    succeeded, or until `drop`.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        step: Step[Ready],
        reporter: StepReporter,
        span: SpanFactory,
    ) -> None:
        self._group = group
        self._step = step
        self._reporter = reporter
        self._span = span
        self._jobs: dict[str, _Job[Ready]] = {}
        self._followed: dict[str, VmRecord] = {}
        """By uid: the last record from the watch."""
        self._done: dict[str, VmRecord] = {}
        """By uid: the record whose step has succeeded."""
        self._news = asyncio.Event()
        self._found: dict[str, VmRecord] | None = None
        """Records from the current list; None if no list is being read. Their steps start after
        the list, because a step may need keys that come later in the list."""
        self._late = LateRecords()
        self.listed: set[str] = set()
        """Uids of the VMs that have a record on the bus and are not being deleted."""
        self.synced = False
        """True after the first complete list. Before, `listed` may lack VMs."""

    # --- records ---------------------------------------------------------------------------
    async def follow(
        self,
        watch: Watch,
        node: str,
        *,
        of_node: Callable[[Entry | WatchMark], None] = lambda _: None,
        compare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Follow the records of a node until cancelled.

        `of_node` gets the marks, and the entries that are neither VM records nor operations.
        `compare` runs at the start and before each periodic list.
        """
        self._late.relist = watch.relist
        async with asyncio.TaskGroup() as group:
            group.create_task(_relist(watch, compare))
            async for item in watch:
                match item:
                    case WatchMark.RESET:
                        self._late.begin()
                        self._found = {}
                        self.listed.clear()
                        of_node(item)
                    case WatchMark.SYNCED:
                        self._keep_listed()
                        of_node(item)
                        self._want_found()
                    case Entry():
                        self._see(item, node, of_node)
                self._news.set()

    def _see(self, entry: Entry, node: str, of_node: Callable[[Entry | WatchMark], None]) -> None:
        uid = entry.key.rpartition(".")[2]
        if of_operation(entry.key):
            return  # operations are for the agent
        if not is_id(uid) or of_node_group(entry.key):
            of_node(entry)
            return
        self.listed.discard(uid)
        try:
            record = read_record(entry.key, entry.value) if entry.kind is EntryKind.PUT else None
        except VirtbusError as error:
            extra = {"code": "record_unreadable", "uid": uid}
            log.error("record %s cannot be read: %s", entry.key, error, extra=extra)
            self.listed.add(uid)  # the VM has a record, so its resources must stay
            return
        if not isinstance(record, VmRecord) or record.ending or record.node != node:
            self.drop(uid)  # keeps the VM's resources until the agent requests their removal
            return
        self.listed.add(uid)
        self._followed[uid] = record
        follows = self._step.follows(record)
        if self._found is None:
            if follows and not _has_parts(self._done.get(uid), record):
                self.want(record)
            return
        self._found.pop(uid, None)
        if follows:
            self._found[uid] = record

    def _keep_listed(self) -> None:
        for uid in (self._jobs.keys() | self._followed.keys()) - self.listed:
            self.drop(uid)
        self.synced = True
        self._late.complete(self.listed)

    def _want_found(self) -> None:
        found, self._found = self._found or {}, None
        for record in found.values():
            self.want(record)

    async def newest(self, record: VmRecord, within_s: float) -> VmRecord | None:
        """Return this record or a newer record of its VM, once the watch has delivered it.

        The watch has then also delivered each key that was written before the record. After
        `within_s`, request a new list and return None. If the new list shows only an older or an
        unreadable record of the VM, the next call returns `record`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    if self._found is None and (found := self._proven(record)) is not None:
                        return found
                    self._news.clear()
                    await self._news.wait()
        self._late.note(record.uid, _age(record))
        return None

    def _proven(self, record: VmRecord) -> VmRecord | None:
        found = self._followed.get(record.uid)
        if found is not None and _age(found) >= _age(record):
            return found
        listed = record.uid in self.listed
        return record if listed and self._late.proven(record.uid, _age(record)) else None

    # --- jobs ------------------------------------------------------------------------------
    def want(self, record: VmRecord, logins: Mapping[str, str] = NO_LOGINS) -> None:
        """Start the step for a record now. Ignore a record older than the job's record."""
        job = self._jobs.get(record.uid)
        if job is not None and _age(record) < _age(job.record):
            return
        newer = job is None or _age(record) > _age(job.record)
        if job is not None and not (newer and self._step.interrupts):
            if newer or record != job.record:  # labels change without a new generation
                job.record = record
            job.logins = logins or job.logins
            job.again.set()
            return
        if job is not None:
            self._cancel(job)
        self._done.pop(record.uid, None)
        job = _Job(record, asyncio.get_running_loop().create_future(), logins)
        self._jobs[record.uid] = job
        job.task = self._group.create_task(self._run(job))

    async def ensure(self, record: VmRecord, logins: Mapping[str, str] = NO_LOGINS) -> Ready:
        """Return the outcome of the running attempt, or the failure whose retry is pending.

        A permanent failure is tried again, because a person may have repaired the cause. A
        VirtbusError becomes part of the outcome.
        """
        job = self._jobs.get(record.uid)
        if job is not None and _age(record) < _age(job.record):
            error = VirtbusError(
                Code.CONFLICT, "stale_epoch", "the service already works on a newer record"
            )
            return self._step.refusal(record, error)
        same = job is not None and _age(record) == _age(job.record)
        if job is not None and same and job.failed is not None and not job.for_good:
            return job.failed
        self.want(record, logins)
        return await self._jobs[record.uid].answer()

    def drop(self, uid: str, *, up_to_epoch: int | None = None) -> None:
        """Stop working for a VM whose record is gone or that is being deleted.

        The VM's resources stay. With `up_to_epoch`, a job of a higher epoch continues.
        """
        if up_to_epoch is None:
            self._followed.pop(uid, None)
            if self._found is not None:
                self._found.pop(uid, None)
            self._step.forgets(uid)
        job = self._jobs.get(uid)
        done = self._done.get(uid)
        if done is not None and (up_to_epoch is None or done.epoch <= up_to_epoch):
            del self._done[uid]
        if job is None or (up_to_epoch is not None and job.record.epoch > up_to_epoch):
            return
        del self._jobs[uid]
        self._cancel(job)

    def end(self, want: Release) -> str:
        """Stop working for a VM whose resources are about to be released; return its uid.

        Raises:
            VirtbusError: 400 `invalid`: the uid is malformed.
            VirtbusError: 409 `record_stands`: `want` covers all epochs, and the VM has a record.
        """
        uid = valid_uid(want.uid)
        if want.epoch >= ANY_EPOCH and uid in self.listed:
            message = f"{uid} has a record; only the epoch of that record may be released"
            raise VirtbusError(Code.CONFLICT, "record_stands", message)
        self.drop(uid, up_to_epoch=want.epoch)
        return uid

    def _cancel(self, job: _Job[Ready]) -> None:
        if job.task is not None:
            job.task.cancel()
        if not job.outcome.done():
            error = VirtbusError(
                Code.UNAVAILABLE, "record_changed", "the record changed; ask with the new one"
            )
            job.outcome.set_result(self._step.refusal(job.record, error))

    async def _run(self, job: _Job[Ready]) -> None:
        pauses, loop = delays(self._step.first_retry_s, LAST_RETRY_S), asyncio.get_running_loop()
        attempt = 0
        while True:
            attempt += 1
            record, began_s = job.record, loop.time()
            ready = await self._attempt(record, job.logins, attempt)
            await self._publish(ready, began_s, asked=job.askers > 0)
            if job.record is not record:
                continue
            if not job.outcome.done():
                job.outcome.set_result(ready)
            if ready.error is None:
                if self._jobs.get(record.uid) is job:
                    del self._jobs[record.uid]
                    self._done[record.uid] = record
                return
            job.failed = ready
            job.outcome = loop.create_future()
            job.again.clear()
            await wait_for_event(job.again, None if job.for_good else next(pauses))
            job.failed = None

    async def join_or_attempt(self, record: VmRecord) -> Ready:
        """Return the outcome of the running attempt for an equal record, or of a new attempt.

        The watch and the agent's request often start the same work within milliseconds.
        """
        job = self._jobs.get(record.uid)
        if job is not None and job.failed is None and job.record == record:
            return await job.answer()
        began_s = asyncio.get_running_loop().time()
        ready = await self._attempt(record)
        await self._publish(ready, began_s, asked=True)
        return ready

    async def _publish(self, ready: Ready, began_s: float, *, asked: bool) -> None:
        """Publish an attempt's outcome. Skip a success that a request gets within ANSWERED_S."""
        late = asyncio.get_running_loop().time() - began_s > ANSWERED_S
        if late or not asked or ready.error is not None:
            await self._reporter.ready(ready)

    async def _attempt(
        self, record: VmRecord, logins: Mapping[str, str] = NO_LOGINS, number: int = 1
    ) -> Ready:
        step, extra = self._step, {"uid": record.uid}
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            with self._span(step.span, uid=record.uid, parent=record.traceparent):
                done = await step.ensure(record, logins)
            if done.made is not None:
                self._reporter.made(record, (loop.time() - began_s) * 1000, done.made)
            ready = done.ready
        except VirtbusError as error:
            log.warning("failed to %s: %s", step.name, error, extra=extra | {"code": error.reason})
            ready = self._failed(record, error, number)
        except Exception:  # boundary: one VM's fault must not end the work for other VMs
            log.exception("failed to %s", step.name, extra=extra | {"code": "internal"})
            message = f"{self._reporter.service} failed to {step.name}; see its log"
            ready = self._failed(record, VirtbusError(Code.INTERNAL, "internal", message), number)
        return ready

    def _failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> Ready:
        self._reporter.failed(record, error, attempt)
        return self._step.refusal(record, error)


async def _relist(watch: Watch, compare: Callable[[], Awaitable[None]] | None) -> None:
    while True:
        if compare is not None:
            await compare()
        await asyncio.sleep(RELIST_S)
        watch.relist()


def _has_parts(done: VmRecord | None, record: VmRecord) -> bool:
    return done is not None and all(getattr(done, f) == getattr(record, f) for f in PARTS)


def _age(record: VmRecord) -> tuple[int, int]:
    return record.epoch, record.generation
