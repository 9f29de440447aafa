"""Ensures each VM's network for as long as its record exists."""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from virtbus.bus.client.tracing import SpanFactory
from virtbus.bus.runtime.backoff import delays
from virtbus.netd.attachments import Attachments
from virtbus.netd.reporter import NetworkReporter
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


@dataclass(slots=True)
class _Job:
    record: VmRecord
    task: "asyncio.Task[None] | None" = None
    again: asyncio.Event = field(default_factory=asyncio.Event)


class NetworkWorker:
    """Serial per VM, parallel across VMs; temporary failures are retried with growing delays.

    A job lives from `want` until its network exists, or `drop`.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        attachments: Attachments,
        facts: NetworkReporter,
        span: SpanFactory,
    ) -> None:
        self._group = group
        self._attachments = attachments
        self._facts = facts
        self._span = span
        self._jobs: dict[str, _Job] = {}

    def want(self, record: VmRecord) -> None:
        """Ensure the record's network now; a newer record replaces an older one."""
        job = self._jobs.get(record.uid)
        if job is None:
            job = self._jobs[record.uid] = _Job(record)
            job.task = self._group.create_task(self._run(job))
        elif (record.epoch, record.generation) >= (job.record.epoch, job.record.generation):
            job.record = record
            job.again.set()

    def drop(self, uid: str) -> None:
        """Stop trying for a VM: its record is gone, or about to end. Removes nothing."""
        job = self._jobs.pop(uid, None)
        if job is not None and job.task is not None:
            job.task.cancel()

    def keep_only(self, uids: Collection[str]) -> None:
        """Stop trying for all VMs that a complete list does not contain."""
        for uid in set(self._jobs) - set(uids):
            self.drop(uid)

    async def ensure(self, record: VmRecord) -> NetReady:
        """Make one attempt; its outcome is published, and returned even if it failed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        before = self._attachments.state_of(record.uid)
        try:
            with self._span("virtbus attach network", uid=record.uid, parent=record.traceparent):
                ready = await self._attachments.ensure(record, self._facts.ready)
        except VirtbusError as error:
            extra = {"code": error.reason, "uid": record.uid}
            log.warning("attaching the network failed: %s", error, extra=extra)
            self._facts.failed(record, error)
            ready = _failed(record, error)
        else:
            if before is None or before.phase is not NetPhase.READY:
                self._facts.attached(record, ready, (loop.time() - began_s) * 1000)
        await self._facts.ready(ready)
        return ready

    async def _run(self, job: _Job) -> None:
        pauses = delays(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            job.again.clear()
            ready = await self._attempt(job.record)
            if job.again.is_set():
                continue
            if ready.error is None:
                self._jobs.pop(job.record.uid, None)
                return
            never = ready.error.retry is Retry.NEVER
            await _pause(job, None if never else next(pauses))

    async def _attempt(self, record: VmRecord) -> NetReady:
        try:
            return await self.ensure(record)
        except Exception:  # boundary: one VM's fault must not end the others' work
            extra = {"code": "internal", "uid": record.uid}
            log.exception("attaching a network failed", extra=extra)
            message = "netd failed to attach the network; see its log"
            return _failed(record, VirtbusError(Code.INTERNAL, "internal", message))


async def _pause(job: _Job, longest_s: float | None) -> None:
    """Wait until it is wanted again, or for `longest_s` (None: without limit)."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await job.again.wait()


def _failed(record: VmRecord, error: VirtbusError) -> NetReady:
    return NetReady(
        uid=record.uid,
        epoch=record.epoch,
        generation=record.generation,
        phase=NetPhase.FAILED,
        error=error.body,
    )
