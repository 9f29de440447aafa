"""Carries out operations on a node's VMs and volumes; serial per VM or volume (ADR 0048).

The runner is level-triggered: each round compares the operations on the bus with imaged's answers.
So a restarted agent continues the operations, and a repeated step changes nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

from pydantic import BaseModel

from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.recent import Recent
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.core.disk_work import DiskWork
from virtbus.nodeagent.live_backups import LiveBackups
from virtbus.nodeagent.live_merges import LiveMerges
from virtbus.nodeagent.live_reads import SERVE, LiveReads, Read
from virtbus.nodeagent.live_snapshots import UNKNOWN, LiveSnapshots
from virtbus.nodeagent.operation_rules import (
    OFF,
    backup_work,
    before,
    during,
    flatten_work,
    guest_of,
    is_off,
    snapshot_work,
)
from virtbus.nodeagent.operation_statuses import OperationStatuses
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas import subjects
from virtbus.schemas.backup import VerifyWork
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ExportWork, FillWork, WorkState
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.records import read_operation
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ROUND_S = 1.0
ASK_S = 5.0
REMEMBERED = 10_000
LATER = frozenset({"recovering", UNKNOWN})
"""Reasons of errors after which the step is repeated. All other errors fail the operation."""


class _Held(NamedTuple):
    record: OperationRecord
    revision: int


class LiveWork(NamedTuple):
    """The objects that handle the disks of running guests. Tests may pass None."""

    snapshots: LiveSnapshots | None = None
    backups: LiveBackups | None = None
    reads: LiveReads | None = None
    merges: LiveMerges | None = None


NO_LIVE_WORK = LiveWork()


class OperationRunner:
    """Carries out the operations of one node. A watch calls `take` and the methods `list_*`."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        vms: Callable[[], Iterable[ActorState]],
        ready: Callable[[], bool],
        live: LiveWork = NO_LIVE_WORK,
        disk_work: DiskWork | None = None,
    ) -> None:
        """`ready` returns True once a list is complete and the bus is the node's own.

        `disk_work` counts the requests to imaged.
        """
        self._disk_work = disk_work or DiskWork()
        self._bus = bus
        self._node = node
        self._vms = vms
        self._ready = ready
        self._live, self._backups, self._reads, self._merges = live
        self._statuses = OperationStatuses(bus, node)
        self._held: dict[str, _Held] = {}
        self._open: dict[str, _Held] = {}
        """The operations that a round handles. An operation stays until its end is known."""
        self._missing: set[str] = set()
        self._purged: dict[str, None] = {}
        self._unknown = False
        """True if the node may have readings without an operation."""
        self._removed: Recent[str, None] = Recent(REMEMBERED)
        self._wake = asyncio.Event()

    # --- input ------------------------------------------------------------------------------
    def list_begins(self) -> None:
        """Begin a list. `list_ends` forgets the operations that are not in the list."""
        self._missing = set(self._held)

    def list_ends(self) -> None:
        """Forget operations that are not in the complete list. Their files stay, and expire."""
        for gone in self._missing:
            self._forget(gone)
        self._missing.clear()
        self._unknown = self._reads is not None
        self._wake.set()

    def take(self, entry: Entry) -> None:
        """Handle an operation of the watch; raise VirtbusError if it is unreadable."""
        id_ = entry.key.rpartition(".")[2]
        self._missing.discard(id_)
        if entry.kind is EntryKind.PURGE:
            self._forget(id_)
            if id_ not in self._removed:
                self._purged[id_] = None
        else:
            held = _Held(read_operation(entry.key, entry.value), entry.revision)
            self._held[id_] = self._open[id_] = held
        self._wake.set()

    def _forget(self, id_: str) -> None:
        self._held.pop(id_, None)
        self._open.pop(id_, None)
        self._statuses.forget(id_)

    def of_id(self, id_: str) -> OperationRecord | None:
        held = self._held.get(id_)
        return held.record if held is not None else None

    # --- rounds -----------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            await wait_for_event(self._wake, ROUND_S if self._has_work() else None)
            self._wake.clear()
            if self._ready():
                await self.round()

    def _has_work(self) -> bool:
        self._drop_ended()
        return self._unknown or bool(self._purged) or bool(self._open)

    def _drop_ended(self) -> None:
        for id_ in [id_ for id_ in self._open if self._statuses.ended(id_)]:
            del self._open[id_]

    def _queues(self) -> list[list[OperationRecord]]:
        """Return the operations of each VM and volume, ordered by revision.

        An operation in which a running guest takes part is in the queue of the guest's VM.
        """
        self._drop_ended()
        vms = list(self._vms())
        found: dict[str, list[OperationRecord]] = {}
        for held in sorted(self._open.values(), key=lambda one: one.revision):
            guest = guest_of(held.record, vms)
            uid = guest.record.uid if guest is not None else held.record.uid
            found.setdefault(uid, []).append(held.record)
        return list(found.values())

    async def round(self) -> None:
        """Do one step of one operation of each VM and volume."""
        if self._merges is not None:
            self._merges.keep(self._open)
        async with asyncio.TaskGroup() as group:
            if self._unknown and self._reads is not None:
                group.create_task(self._end_unknown(self._reads))
            for id_ in list(self._purged):
                group.create_task(self._remove(id_))
            for queue in self._queues():
                group.create_task(self._guarded(queue))

    async def _end_unknown(self, reads: LiveReads) -> None:
        busy = {vm.record.uid for vm in self._vms() if vm.phase not in OFF}
        self._unknown = False
        try:
            ended = await reads.end_unknown(self._held, busy)
        except OSError as error:  # of the disk with the pins
            extra = {"code": "store_error"}
            log.warning("readings without an operation are ended later: %s", error, extra=extra)
            ended = False
        if not ended:
            self._unknown = True

    async def _guarded(self, queue: list[OperationRecord]) -> None:
        """Do the next step of the queue's running operation, or of the first if none runs.

        A cancel or a finish raises the revision of a record, so the running operation is not always
        the first.
        """
        op = queue[0]
        try:
            phases = [(await self._statuses.get(each)).phase for each in queue]
            if OperationPhase.RUNNING in phases:
                op = queue[phases.index(OperationPhase.RUNNING)]
            await self._bounded(op)
        except ConflictError:
            pass  # a controller ended the operation; the next round reads the status again
        except BusError as error:
            extra = {"code": "operation_waits", "uid": op.uid}
            log.info("operation %s will be continued: %s", op.id, error, extra=extra)

    async def _bounded(self, op: OperationRecord) -> None:
        """Do the next step. Raise BusError; all other unexpected errors fail the operation."""
        try:
            await self._step(op)
        except BusError:
            raise
        except Exception:  # boundary: one operation's fault must not end the service
            extra = {"code": "internal", "uid": op.uid}
            log.exception("operation %s failed unexpectedly", op.id, extra=extra)
            status = await self._statuses.get(op)
            with contextlib.suppress(Exception):  # the cancel itself may have failed
                await self._work(op, "cancel", status)
            error = VirtbusError(Code.INTERNAL, "internal", "it failed; see the node agent's log")
            now_ns = self._bus.sources.time_ns()
            await self._write(op, status.after("fail", now_ns, step="", error=error.body))

    async def _step(self, op: OperationRecord) -> None:
        status = await self._statuses.get(op)
        if status.ended:
            return
        if status.phase is OperationPhase.ACCEPTED:
            await self._begin(op, status)
        else:
            await self._continue(op, status)

    async def _begin(self, op: OperationRecord, status: OperationStatus) -> None:
        verdict, now_ns = before(op, self._vms()), self._bus.sources.time_ns()
        if op.cancel or verdict.ends:
            await self._write(op, status.after("cancel", now_ns, message=verdict.ends))
        elif verdict.error is not None:
            await self._write(op, status.after("fail", now_ns, error=verdict.error))
        elif verdict.waits:
            await self._write(op, status.model_copy(update={"message": verdict.waits}))
        else:
            self._disk_work.begin()  # before any await, so that a later start of the VM asks imaged
            begun = status.after("begin", now_ns)
            await self._write(op, begun)
            await self._continue(op, begun)

    async def _continue(self, op: OperationRecord, status: OperationStatus) -> None:
        verdict = during(op, self._vms())
        cancel = op.cancel or bool(verdict.ends)
        pushed = self._backups is not None and self._backups.begun(op.id)
        uses_disks = op.snapshot is not None or op.kind == "flatten"
        uses_disks |= op.kind == "backup" and not pushed
        uses_disks |= op.kind == "serve" and status.step != SERVE
        waits = uses_disks and (not cancel or op.kind == "flatten")  # QEMU may still copy
        if waits and before(op, self._vms()).waits:
            return  # imaged may have lost the work, and a guest may have the disks
        do: Literal["cancel", "ensure"] = "cancel" if cancel else "ensure"
        try:
            state = await self._work(op, do, status)
        except VirtbusError as error:
            if error.reason in LATER:
                await self._write(op, status.model_copy(update={"message": str(error)}))
                return
            now_ns = self._bus.sources.time_ns()
            await self._write(op, status.after("fail", now_ns, step="", error=error.body))
            return
        await self._write(op, self._after(op, status, state, verdict.ends))

    async def _work(
        self, op: OperationRecord, do: Literal["cancel", "ensure"], status: OperationStatus
    ) -> WorkState:
        guest = guest_of(op, self._vms())
        if op.kind == "serve":
            return await self._serve(op, do, status, guest)
        if op.kind == "backup" and self._backups is not None:
            work = backup_work(op, do, self._vms())
            if do == "cancel":
                return await self._backups.cancel(work, partial(self._imaged, "backup"))
            if guest is not None or self._backups.begun(op.id):
                return await self._backups.ensure(work, guest, partial(self._imaged, "backup"))
        elif op.kind == "snapshot" and guest is not None and self._live is not None:
            step = self._live.cancel if do == "cancel" else self._live.ensure
            return await step(
                snapshot_work(op, do, self._vms()), guest, partial(self._imaged, "snapshot")
            )
        elif op.kind == "flatten" and guest is not None and self._merges is not None:
            merge = flatten_work(op, do, self._vms())
            return await self._merges.do(merge, guest, partial(self._imaged, "flatten"))
        return await self._ask(op, do)

    async def _serve(
        self, op: OperationRecord, do: str, status: OperationStatus, guest: ActorState | None
    ) -> WorkState:
        if self._reads is None:
            message = "this agent serves no disks"
            raise VirtbusError(Code.UNSUPPORTED, "no_readings", message)
        vms = list(self._vms())
        read = Read(op, status, backup_work(op, do, vms), guest, is_off(op, vms))
        step = self._reads.cancel if do == "cancel" else self._reads.ensure
        return await step(read, partial(self._imaged, "scratch"))

    def _after(
        self, op: OperationRecord, status: OperationStatus, state: WorkState, why: str
    ) -> OperationStatus:
        """Return the status after a step. `why` is the reason for a cancel."""
        now_ns = self._bus.sources.time_ns()
        if state.state == "done":
            size = status.total_bytes if op.kind == "fill" else state.done_bytes
            if state.result is not None:
                size = state.result.size_bytes
            done: dict[str, object] = {"step": "", "done_bytes": size, "total_bytes": size}
            done |= {"virtual_size_bytes": state.virtual_size_bytes, "message": state.message}
            return status.after("succeed", now_ns, result=state.result, **done)
        if state.state == "none":
            return status.after("cancel", now_ns, step="", message=why)
        fields = {
            "step": state.step,
            "done_bytes": state.done_bytes,
            "total_bytes": state.total_bytes,
            "message": state.message,
        }
        return status.model_copy(update=fields)

    async def _write(self, op: OperationRecord, status: OperationStatus) -> None:
        if await self._statuses.write(op, status) and status.ended:
            self._wake.set()  # begins the next operation of this VM or volume

    async def _ask(self, op: OperationRecord, do: str) -> WorkState:
        work: FillWork | ExportWork
        if op.kind in {"snapshot", "restore"}:
            return await self._imaged("snapshot", snapshot_work(op, do, self._vms()))
        if op.kind == "backup":
            return await self._imaged("backup", backup_work(op, do, self._vms()))
        if op.kind == "verify":
            check = VerifyWork.model_validate({"id": op.id, "do": do, "backup": op.backup})
            return await self._imaged("backup-verify", check)
        if op.kind == "flatten":
            return await self._imaged("flatten", flatten_work(op, do, self._vms()))
        if op.kind == "fill":
            fields = {"id": op.id, "do": do, "ref": op.ref, "source": op.source}
            work = FillWork.model_validate(fields)
        else:
            fields = {"id": op.id, "do": do, "uid": op.uid, "ref": op.ref, "format": op.format}
            work = ExportWork.model_validate(fields | {"disk": op.disk or None})
        return await self._imaged(op.kind, work)

    async def _imaged(self, verb: str, work: BaseModel) -> WorkState:
        subject = subjects.rpc(self._node, "imaged", verb)
        self._disk_work.begin()
        return validate(WorkState, await self._bus.request(subject, work, timeout_s=ASK_S))

    async def _remove(self, id_: str) -> None:
        """Remove the file of a deleted operation.

        If imaged is away or recovers, the next round repeats the removal. If imaged refuses, the
        file stays until it expires.
        """
        try:
            work = ExportWork(id=id_, do="remove", uid=id_)
            subject = subjects.rpc(self._node, "imaged", "export")
            await self._bus.request(subject, work, timeout_s=ASK_S)
        except BusError as error:
            log.info("export %s is removed later: %s", id_, error, extra={"code": "export_remains"})
            return
        except VirtbusError as error:
            log.info("export %s remains: %s", id_, error, extra={"code": "export_remains"})
            if error.reason in LATER:
                return
        self._purged.pop(id_, None)
        self._removed[id_] = None


def unknown_export(id_: str, node: str) -> VirtbusError:
    """Return 404 `export_not_here`: the node has no finished export with that id."""
    message = f"{node} has no file of export {id_}; `virtbus operation get {id_}` shows its state"
    return VirtbusError(Code.NOT_FOUND, "export_not_here", message)
