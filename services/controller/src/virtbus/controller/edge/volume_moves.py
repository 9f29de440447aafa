"""Moves volumes between nodes and pools, as a leader task (ADR 0063).

The state of a move is the volume's record and two operations, all on the bus. Each round reads the
state and does the next step. After a crash at any step, the next leader continues the move.
"""

import asyncio
import logging
from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import Background, background, wait_for_event
from virtbus.controller.core import volume_moves
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.operations import StoredOperation
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.moved_files import MovedFiles
from virtbus.controller.edge.off_moves import OffMoves
from virtbus.controller.edge.operation_writes import OperationWrites
from virtbus.controller.edge.volume_orphans import VolumeOrphans
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import VolumeRelease
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.volume import VolumeMove, VolumeRecord

log = logging.getLogger(__name__)

ROUND_S = 2.0
SETTLE_S = 0.1
"""Delay after `wake`, so that one round handles simultaneous changes."""
ASK_S = 5.0
RESTORED = "a restore changed the volume meanwhile"


class VolumeMoves:
    """Moves volumes, with a task for each move."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents, files: MovedFiles) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._files = files
        self._volumes = VolumeWrites(bus)
        self._operations = OperationWrites(bus)
        self._orphans = VolumeOrphans(bus, fleet)
        self._off = OffMoves(bus, fleet, events)
        self._wake = asyncio.Event()
        self._busy: set[str] = set()

    def wake(self) -> None:
        """Start a round if a move has no running task: an operation of the move may have ended."""
        if self._fleet.volumes.moving - self._busy:
            self._wake.set()

    async def run(self, tenure: LeaderTerm) -> None:
        """Move volumes while the fleet lease is held."""
        async with background() as tasks:
            while True:
                self._start(tasks, tenure)
                if await wait_for_event(self._wake, ROUND_S):
                    await asyncio.sleep(SETTLE_S)
                self._wake.clear()

    def _start(self, tasks: Background, tenure: LeaderTerm) -> None:
        for key in sorted(self._fleet.volumes.moving - self._busy):
            tenure.check()
            self._busy.add(key)
            tasks.start(self._guarded(key, tenure))

    async def _guarded(self, key: str, tenure: LeaderTerm) -> None:
        try:
            known = self._fleet.volumes.at(key)
            if known is None:
                return
            held = await self._volumes.latest(known.record.namespace, known.record.name)
            if held is not None and held.record.move is not None and not held.record.deleting:
                await self._step(held, held.record.move, tenure)
        except ConflictError:
            return  # another change was first
        except (BusError, VirtbusError) as error:
            log.info("a move will be continued: %s", error, extra={"code": "move_waits"})
        finally:
            self._busy.discard(key)

    async def _step(self, held: StoredVolume, move: VolumeMove, tenure: LeaderTerm) -> None:
        """Do the next step of a move; raises ConflictError, BusError, VirtbusError."""
        record = held.record
        if not record.has_open_move:
            return
        if not record.is_moving:
            await self._clean(held, move, tenure)
            return
        try:
            why = await self._off.broken(record, move)
            after = volume_moves.failed(record, why) if why else await self._after(record, move)
        except VirtbusError as error:
            if error.body.after_ms is not None or error.code == Code.DEADLINE:
                raise
            if error.reason == "export_not_here":
                raise  # the node's agent has just started; the next round repeats this step
            if error.code == Code.GONE:  # the volume was deleted during the copy of its file
                await self._files.drop(record, move)
            after = volume_moves.failed(record, error.body.message)
        if after is not None:
            tenure.check()
            await self._end(held, after, tenure)

    async def _end(self, held: StoredVolume, after: VolumeRecord, tenure: LeaderTerm) -> None:
        """Write the volume after its move.

        After a successful move, the record of the VM that holds the volume is written too.
        """
        if not held.record.holder or (after.move is not None and after.move.failed):
            await self._replace(held, after)
            return
        for one in await self._off.switch(held, after, tenure, self._ended_by):
            self._tell(one)

    async def _ended_by(self, record: VolumeRecord, move: VolumeMove) -> VolumeRecord | None:
        """Return the record after its move of another volume of the VM; None while it moves."""
        first = await self._operations.latest(move.export)
        fill = await self._operations.latest(move.fill)
        if first is None or fill is None:
            return None
        made = (await self._operations.status(fill.record)).status
        return self._end_of(record, move, first, made)

    async def _after(self, record: VolumeRecord, move: VolumeMove) -> VolumeRecord | None:
        """Do the next step of a move; return the volume's record after a completed move.

        Return None while the move is incomplete.

        Raises:
            VirtbusError: a request has failed; `_step` decides if it is repeated.
            BusError: a node does not answer.
        """
        now_ns = self._bus.sources.time_ns()
        if record.holder and self._off.waits(record):
            return None
        if move.source == move.target:
            first, made = await self._operation(volume_moves.fill_here(record, move, now_ns))
            return self._end_of(record, move, first, made)
        export, status = await self._operation(volume_moves.export_of(record, move, now_ns))
        if not status.ended:
            return None
        if status.result is None:
            return volume_moves.failed(record, volume_moves.why_failed(status))
        if self._restored_after(record, export):
            return volume_moves.failed(record, RESTORED)
        wanted = volume_moves.fill_of(record, move, status.result, now_ns)
        if await self._operations.latest(move.fill) is None:
            await self._files.carry(record, move, status.result)
        _, made = await self._operation(wanted)
        return self._end_of(record, move, export, made)

    def _end_of(
        self,
        record: VolumeRecord,
        move: VolumeMove,
        first: StoredOperation,
        made: OperationStatus,
    ) -> VolumeRecord | None:
        """Return the volume's record after its move; None while the fill is open.

        `made` is the status of the fill. `first` is the operation that read the data: the export,
        or the fill of a move within a node.
        """
        if not made.ended:
            return None
        if self._restored_after(record, first):
            return volume_moves.failed(record, RESTORED)
        if made.phase is not OperationPhase.SUCCEEDED:
            return volume_moves.failed(record, volume_moves.why_failed(made))
        return volume_moves.switched(record, move, made.virtual_size_bytes)

    async def _operation(self, wanted: OperationRecord) -> tuple[StoredOperation, OperationStatus]:
        """Write the operation if it does not exist; return it and its current status."""
        held = await self._operations.latest(wanted.id)
        if held is None:
            held, _ = await self._operations.create(wanted)
            self._fleet.operations.apply(held)
            self._events.operation(held.record, held.revision)
        return held, (await self._operations.status(held.record)).status

    def _restored_after(self, volume: VolumeRecord, export: StoredOperation) -> bool:
        """Return True if a restore into the volume or its VM was accepted after `export`."""
        later = (one for one in self._fleet.operations.all() if one.revision > export.revision)
        into = {volume.uid, volume.holder}
        return any(one.record.uid in into and one.record.kind == "restore" for one in later)

    # --- the end ----------------------------------------------------------------------------
    async def _clean(self, held: StoredVolume, move: VolumeMove, tenure: LeaderTerm) -> None:
        """Remove the remains of an ended move: its files, and one copy of the data.

        After a successful move, that is the copy at the source; after a failed move, the copy at
        the target.
        """
        record = held.record
        for id_ in (move.export, move.fill):
            if not await self._ended(id_):
                return  # the next round checks again
        node, ref = volume_moves.left_behind(record, move)
        tenure.check()
        # After a restore of the bus to a time before the end of a successful move, the move may
        # fail, because the source no longer has the data. Then the copy on the target is the only
        # copy, and stays. An audit lists it.
        only = bool(move.failed) and move.source != move.target
        only = only and not await self._orphans.has(move.source, ref)
        if self._fleet.has_node(node) and not only:
            # After a failed move, the target removes only data that this move's fill has made.
            ask = VolumeRelease(ref=ref, made_by=move.fill if move.failed else None)
            if move.failed and move.source == move.target:
                ask = ask.model_copy(update={"kept": ref_of(record)})
            subject = subjects.rpc(node, "imaged", "volume-release")
            await self._bus.request(subject, ask, timeout_s=ASK_S)
        await self._files.drop(record, move)
        export = await self._operations.latest(move.export)
        if export is not None:
            await self._operations.remove(export)  # this also removes the exported file
        await self._replace(held, volume_moves.cleaned(record))

    async def _ended(self, id_: str) -> bool:
        """Return True if an operation has ended or does not exist; cancel an open operation."""
        held = await self._operations.latest(id_)
        if held is None or (await self._operations.status(held.record)).status.ended:
            return True
        with suppress(VirtbusError):  # the operation can no longer be cancelled
            await self._operations.cancel(id_)
        return False

    async def _replace(self, held: StoredVolume, record: VolumeRecord) -> None:
        self._tell(await self._volumes.replace(held, record))

    def _tell(self, new: StoredVolume) -> None:
        record = new.record
        self._fleet.volumes.apply(new)
        message = volume_moves.shown(record, "") or f"moved to {record.node}"
        self._events.named(EventKind.VOLUME_UPDATED, record, new.revision, message)
        extra = {"code": "volume_move", "uid": record.uid}
        log.info("volume %s: %s", record.name, message, extra=extra)
