"""Begins and ends moves of volumes whose VM is off, in one batch with the VM's record (ADR 0087).

The batch that begins a move writes the VM's record again, unchanged. A start of the VM also writes
the record. Both expect the revision that they have read, so only one of the two succeeds.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from virtbus.bus.client.ports import Bus, Write
from virtbus.controller.core import off_moves, volume_moves
from virtbus.controller.core.evacuation import evacuating, local_volumes, released_by_node
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredVm, StoredVolume
from virtbus.controller.core.volume_attachment import disks_of, is_off
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.edge.assignment import Assignment
from virtbus.controller.edge.commit import Commits, Fenced
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.reservations import NodeFullError, Reservations
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeMove, VolumeRecord
from virtbus.schemas.wire import encode

Ending = Callable[[VolumeRecord, VolumeMove], Awaitable[VolumeRecord | None]]
"""Returns the volume's record after its move; None while the fill of the move has not ended."""


class _Ended(NamedTuple):
    """A volume as it was read, and its record after the move."""

    held: StoredVolume
    after: VolumeRecord


class OffMoves:
    """Reads VMs and volumes from the stream's leader, and changes both in one batch."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._commits = Commits(bus, fleet)
        self._volumes = VolumeWrites(bus)

    # --- questions --------------------------------------------------------------------------
    async def holder(self, record: VolumeRecord) -> StoredVm | None:
        """Return the VM that holds a volume, None without one; raises UnreadableValueError."""
        return await self._commits.latest(record.holder)

    async def volumes_of(self, vm: VmRecord) -> list[StoredVolume]:
        """Return the readable volumes of a VM that are on its node."""
        found = []
        for ref in local_volumes(vm):
            try:
                there = await self._volumes.latest(ref.namespace, ref.name)
            except UnreadableValueError:
                continue
            if there is not None and there.record.uid == ref.uid:
                found.append(there)
        return found

    async def refuse_start(self, before: VmRecord, after: VmRecord) -> None:
        """Raise 409 `volume_moving` if a change starts a VM while a volume of the VM is moving.

        `before` must be read earlier than the volumes. A move that begins after this check writes
        the VM's record, and makes the CAS of the start fail.
        """
        if after.powered and not before.powered:
            await self.refuse_moving(after)

    async def refuse_moving(self, vm: VmRecord) -> None:
        """Raise 409 `volume_moving` while a volume of the VM is moving."""
        off_moves.refuse_moving(vm, [held.record for held in await self.volumes_of(vm)])

    def waits(self, record: VolumeRecord) -> bool:
        """Return True while an operation replaces files of the disks of the volume's VM."""
        return bool(off_moves.changing(self._fleet.operations.open_of(record.holder)))

    # --- the begin --------------------------------------------------------------------------
    async def begin(self, vm: StoredVm, moving: Sequence[StoredVolume]) -> None:
        """Write the volumes with their moves, and the VM unchanged, by CAS in one batch.

        Raises:
            ConflictError: the VM or a volume has changed; nothing was written.
            BusError: nothing happened, or the outcome is unknown.
        """
        record = vm.record
        key = subjects.vm_record(record.node, record.uid)
        again = Write(key, encode(record), expect=vm.revision)
        await self._bus.batch([*map(_write, moving), again])

    # --- the end ----------------------------------------------------------------------------
    async def broken(self, record: VolumeRecord, move: VolumeMove) -> str:
        """Return why the volume cannot move to another node with its VM; "" if it can."""
        if not record.holder or move.source == move.target:
            return ""
        vm = await self.holder(record)
        if vm is None or vm.record.deleting:
            return ""
        for ref in local_volumes(vm.record):
            there = await self._volumes.latest(ref.namespace, ref.name)
            stored = there.record if there is not None else None
            if why := off_moves.stays_behind(stored, move, vm.record):
                return why
        return ""

    async def switch(
        self, held: StoredVolume, after: VolumeRecord, tenure: LeaderTerm, ending: Ending
    ) -> list[StoredVolume]:
        """Write `after`, the volume's record after its move, and its VM; return written volumes.

        A VM moves to another node together with all of its volumes, after its node has released the
        VM. The list is empty while the move waits: for the VM's other volumes, for the end of the
        VM's delete, for an operation on the VM's disks, or for the release.

        Raises:
            ConflictError: the VM or a volume has changed; nothing was written.
            VirtbusError, BusError: as `Assignment.move`.
        """
        vm = await self.holder(held.record)
        if vm is None or vm.record.deleting:
            return []
        if not disks_of(vm.record, ref_of(held.record)):
            return [await self._volumes.replace(held, after)]
        if vm.record.powered:
            return await self._fail(held, off_moves.STARTED)
        ended = await self._ended(vm.record, held, after, ending)
        return await self._together(vm, ended, after.node, tenure) if ended else []

    async def _ended(
        self, vm: VmRecord, held: StoredVolume, after: VolumeRecord, ending: Ending
    ) -> list[_Ended]:
        """Return the volumes that one batch must write; empty while the move has to wait."""
        if not self._is_due(vm, after.node) or self.waits(held.record):
            return []
        ended = [_Ended(held, after)]
        if after.node == vm.node:
            return ended
        for other in await self.volumes_of(vm):
            move = other.record.move
            if other.record.uid == after.uid or move is None:
                continue
            there = await ending(other.record, move)
            if there is not None and there.node == after.node:
                ended.append(_Ended(other, there))
        return ended if len(ended) == len(local_volumes(vm)) else []

    async def _together(
        self, vm: StoredVm, ended: list[_Ended], node: str, tenure: LeaderTerm
    ) -> list[StoredVolume]:
        """Write a VM with its moved volumes; return the volumes.

        If the VM has to leave its node, the first call only begins the release, and returns an
        empty list.
        """
        lease = {"lease": tenure.check()}
        if node != vm.record.node and not vm.record.evacuating:
            leaving = evacuating(vm.record, self._fleet.last_status(vm.record), node)
            await self._release(
                StoredVm(leaving.model_copy(update=lease), vm.revision), [one.held for one in ended]
            )
            return []
        new = off_moves.with_moved(vm.record, [one.after for one in ended])
        try:
            await self._write(vm, new.model_copy(update=lease), ended, node)
        except NodeFullError as error:
            return await self._fail(ended[0].held, str(error))
        wrote = [await self._volumes.latest(one.after.namespace, one.after.name) for one in ended]
        return [one for one in wrote if one is not None]

    def _is_due(self, vm: VmRecord, node: str) -> bool:
        """Return True if the VM is off and not evacuating, or was released for a move to `node`.

        The release of a fenced node is not needed: the node reported the VM as off before the
        release began, and a fenced node starts no VM.
        """
        status = self._fleet.last_status(vm)
        if not vm.evacuating:
            return is_off(vm, status)
        gone = released_by_node(vm, status) or self._fence_of(vm.node) is not None
        return gone and vm.evacuation_target == node

    def _fence_of(self, node: str) -> Fenced | None:
        known = self._fleet.node_specs.get(node)
        return known if known is not None and known[0].fenced is not None else None

    async def _release(self, vm: StoredVm, volumes: list[StoredVolume]) -> None:
        """Begin the release of a VM by its node; the target has copies of all volumes already.

        From now on, the moves can no longer be given up. The batch writes the volumes unchanged. A
        request that read a volume earlier then conflicts, and sees the VM at its next attempt.
        """
        await self.begin(vm, volumes)
        self._events.emit(
            EventKind.VM_EVACUATING,
            vm.record,
            f"to {vm.record.evacuation_target}, with its volumes",
        )

    async def refuse_late(self, record: VolumeRecord) -> None:
        """Raise 409 `volume_moving` if the move of a volume can no longer be given up."""
        vm = await self.holder(record) if record.is_moving and record.holder else None
        if vm is not None and vm.record.evacuating:
            message = (
                f"the data of {record.name} is complete on {vm.record.evacuation_target}, and "
                f"{vm.record.name} is on its way there; move it back after that"
            )
            raise VirtbusError(Code.CONFLICT, "volume_moving", message, after_ms=5000)

    async def _write(self, vm: StoredVm, new: VmRecord, ended: list[_Ended], node: str) -> None:
        old = vm.record.node
        moved = {
            ref_of(one.after).folder: StoredVolume(one.after, one.held.revision) for one in ended
        }
        if node == old:
            key = subjects.vm_record(node, new.uid)
            volumes = VolumeHolders(self._bus, moved=moved)
            write = Write(key, encode(new), expect=vm.revision)
            await Reservations(self._bus, self._fleet, volumes).write(vm.record, new, [write])
            return
        held, fence = StoredVm(new, vm.revision), self._fence_of(old)
        there = await Assignment(self._bus, self._fleet, moved=moved).move(held, node, fence=fence)
        self._events.emit(EventKind.VM_MOVED, there.record, f"from {old}, with its volumes")

    async def _fail(self, held: StoredVolume, why: str) -> list[StoredVolume]:
        return [await self._volumes.replace(held, volume_moves.failed(held.record, why))]


def _write(held: StoredVolume) -> Write:
    record = held.record
    key = subjects.volume_record(record.namespace, record.name)
    return Write(key, encode(record), expect=held.revision)
