"""Makes the backups of schedules, verifies them and removes old ones, as a leader task.

The task is level-triggered. It stores each step, with the id of the step's operation, in the
schedule's record before it writes the operation. So after a crash at any point, the next leader
continues (ADR 0068).
"""

import asyncio
import logging

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import background, wait_for_event
from virtbus.controller.core import backup_changes, backup_schedules, resting, snapshot_changes
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.retention import unneeded
from virtbus.controller.core.vm_keys import StoredBackupSchedule
from virtbus.controller.edge.backup_directories import BackupDirectories
from virtbus.controller.edge.backup_schedule_writes import BackupScheduleWrites
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.schemas.backup import BackupsAsk
from virtbus.schemas.backup_api import BackupView
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.operation import OperationPhase, OperationRecord

log = logging.getLogger(__name__)

ROUND_S = 10.0
RETAIN_S = 600.0
"""Time limit for the removal of old backups on all nodes."""
SETTLE_S = 0.2
"""Delay after `wake`, so that one round handles concurrent changes."""
PASSING = frozenset({"vm_runs", "unplaced"})
"""Reasons of refusals that pass without help: the VM is starting, waits for a node, or leaves."""


class BackupScheduleRuns:
    """The runs of all backup schedules."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents, room: OperationRoom) -> None:
        self._bus = bus
        self._schedules = fleet.operations.schedules
        self._fleet = fleet
        self._events = events
        self._room = room
        self._writes = BackupScheduleWrites(bus)
        self._operations = OperationWrites(bus)
        self._directories = BackupDirectories(bus, fleet)
        self._wake = asyncio.Event()
        self._ended: list[BackupScheduleRecord] = []
        """Schedules whose run has just succeeded. Their old backups are removed next."""

    def wake(self) -> None:
        """Start a round, because an operation may have ended, or a schedule may be new."""
        if self._schedules.count():
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Work until the lease is lost."""
        async with background() as tasks:
            while True:
                for held in self._schedules.listed(None):
                    tenure.check()
                    await self._guarded(held)
                for record in self._ended:
                    tasks.start(self._retain(record, tenure))
                self._ended.clear()
                if await wait_for_event(self._wake, ROUND_S):
                    await asyncio.sleep(SETTLE_S)
                self._wake.clear()

    async def _guarded(self, held: StoredBackupSchedule) -> None:
        try:
            await self._step(held)
        except ConflictError:
            return  # the schedule changed meanwhile
        except (BusError, VirtbusError) as error:
            extra = {"code": "backup_schedule_waits", "uid": held.record.uid}
            log.info("schedule %s is continued later: %s", held.record.name, error, extra=extra)

    async def _step(self, held: StoredBackupSchedule) -> None:
        record, now_ns = held.record, self._bus.sources.time_ns()
        if backup_schedules.due(record, now_ns):
            run = self._bus.sources.uuid7()
            held = await self._store(held, backup_schedules.begun(record, run, now_ns))
            await self._begin(held)
        elif record.run:
            await self._continue(held, now_ns)

    async def _continue(self, held: StoredBackupSchedule, now_ns: int) -> None:
        record = held.record
        operation = await self._operations.latest(record.run)
        late = backup_schedules.overdue(record, now_ns)
        if operation is None:
            held = held if late == record else await self._store(held, late)
            await self._begin(held)
            return
        status = (await self._operations.status(operation.record)).status
        if not status.ended:
            if late != record:
                await self._store(held, late)
            return
        if status.phase is not OperationPhase.SUCCEEDED:
            why = status.error.message if status.error is not None else status.message
            await self._fail(held, why or "it was cancelled")
        elif record.spec.verify and not record.backup:
            run = self._bus.sources.uuid7()
            held = await self._store(held, backup_schedules.verifying(record, run))
            await self._begin(held)
        else:
            held = await self._store(held, backup_schedules.succeeded(record, now_ns))
            self._ended.append(held.record)

    # --- steps ------------------------------------------------------------------------------
    async def _begin(self, held: StoredBackupSchedule) -> None:
        """Write the run's operation, unless it exists. A permanent refusal ends the run."""
        record = held.record
        try:
            self._room.refuse_more(record.namespace)
            wanted = self._wanted(record) if not record.backup else await self._check(record)
            stored, created = await self._operations.create(wanted)
        except VirtbusError as error:
            if error.code in {Code.UNAVAILABLE, Code.EXHAUSTED} or error.reason in PASSING:
                raise  # the next round tries again
            await self._fail(held, str(error))
            return
        self._fleet.operations.apply(stored)
        if created:
            self._events.operation(stored.record, stored.revision)

    def _wanted(self, record: BackupScheduleRecord) -> OperationRecord:
        """Return the operation of a backup; raise VirtbusError if the VM cannot have one."""
        uid = self._fleet.names.get((record.namespace, record.spec.vm), "")
        vm = self._fleet.vms.get(uid)
        view = self._fleet.show(uid, asyncio.get_running_loop().time())
        if vm is None or view is None or vm.record.owner != record.owner:
            message = f"there is no VM named {record.spec.vm}; create it, or delete the schedule"
            raise VirtbusError(Code.NOT_FOUND, "vm_not_found", message)
        snapshot_changes.refuse_pools(vm.record.volume_refs.values(), "backups")
        snapshot_changes.refuse_devices(vm.record.spec)
        fields = resting.of_vm(vm.record, view.state, live=True)
        return backup_changes.scheduled(record, fields)

    async def _check(self, record: BackupScheduleRecord) -> OperationRecord:
        """Return the operation that verifies the backup of a run.

        Raises:
            VirtbusError: 409: the backup's operation was removed. 422: that operation is
                unreadable.
        """
        made = await self._operations.latest(record.backup)
        if made is None:
            message = "the operation of the backup was removed before the backup was verified"
            raise VirtbusError(Code.CONFLICT, "operation_gone", message)
        view = BackupView(id=record.backup, node=made.record.node, vm=record.spec.vm)
        view = view.model_copy(update={"namespace": record.namespace})
        return backup_changes.verifying(view, record.run, record.owner, record.begun_ns)

    async def _retain(self, record: BackupScheduleRecord, tenure: LeaderTerm) -> None:
        """Remove backups that the schedule does not keep. Failed removals wait for the next run.

        Each node's directory is handled alone, because an increment and its parent are in the same
        directory. A silent node does not delay other nodes or runs. A refused removal does not stop
        other removals.
        """
        extra = {"code": "backups_remain", "uid": record.uid}

        async def remove(node: str) -> None:
            held = [one async for one in self._directories.held(node)]
            for id_ in unneeded(held, record.name, record.namespace, record.spec.keep):
                tenure.check()
                try:
                    await self._directories.ask(node, BackupsAsk(do="delete", id=id_))
                except VirtbusError as error:
                    if error.code != Code.CONFLICT:
                        raise
                    log.warning(
                        "old backup %s on %s stays for now: %s", id_, node, error, extra=extra
                    )
                else:
                    log.info("removed %s, by its schedule", id_, extra={"code": "backup_deleted"})

        nodes = self._directories.nodes()
        until_s = asyncio.get_running_loop().time() + RETAIN_S
        done = await self._directories.each(nodes, remove, until_s)
        if remain := [node for node in nodes if node not in done]:
            log.warning("old backups on %s stay for now", ", ".join(remain), extra=extra)

    async def _fail(self, held: StoredBackupSchedule, why: str) -> None:
        held = await self._store(held, backup_schedules.failed(held.record, why))
        self._events.named(EventKind.BACKUP_SCHEDULE_FAILED, held.record, held.revision, why)
        extra = {"code": "backup_schedule_failed", "uid": held.record.uid}
        log.error("schedule %s: no backup: %s", held.record.name, why, extra=extra)

    async def _store(
        self, held: StoredBackupSchedule, record: BackupScheduleRecord
    ) -> StoredBackupSchedule:
        after = await self._writes.replace(held, record)
        self._schedules.apply(after)
        return after
