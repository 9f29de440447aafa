"""Returns the writes that set and clear holders of volumes, for the batch with a VM's record."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from virtbus.bus.client.owners import may_touch
from virtbus.bus.client.ports import Bus, Write
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import create_step
from virtbus.controller.core.volume_holds import (
    freed,
    grown,
    held,
    ref_of,
    refuse_buffered,
    refuse_hold,
    wanted_volumes,
)
from virtbus.controller.core.volume_placement import Home, home_of
from virtbus.controller.edge.key_states import stored_in
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

NOTHING_MOVED: Mapping[str, StoredVolume] = MappingProxyType({})
NO_VOLUMES: Mapping[str, VolumeRecord] = MappingProxyType({})


class Resolved(NamedTuple):
    """The volumes that a VM's spec names, by disk, and the node that has all of these volumes.

    `home` is None if the spec names no volume.
    """

    refs: dict[str, VolumeRef]
    home: Home | None


class VolumeHolders:
    """Reads volumes from the stream's leader, and returns the writes that change their holders.

    `made` has, by name, the volumes that a VM's create writes in the same batch as the VM.
    With `living`, a hold is refused if a host contradicts the bus about the volume. `moved` has, by
    folder, the volumes whose data has moved: each with the record to write, and the revision of the
    former record.
    """

    def __init__(
        self,
        bus: Bus,
        made: Mapping[str, VolumeRecord] = NO_VOLUMES,
        living: LivingVolumes | None = None,
        moved: Mapping[str, StoredVolume] = NOTHING_MOVED,
    ) -> None:
        self._bus = bus
        self._moved = moved
        self.made = made
        self._living = living

    async def resolve(self, vm: VmRecord) -> Resolved:
        """Return the volumes that the VM's spec names, if the VM may hold all of them.

        Raises:
            VirtbusError: 403 `not_owner`: the VM's owner may not use a volume of another owner.
                422 `unreadable`: a volume's record is unreadable. Also the errors of
                `refuse_hold`, `refuse_buffered` and `home_of`.
        """
        found: dict[str, VolumeRecord] = {}
        for disk, name in wanted_volumes(vm.spec).items():
            if name in self.made:
                found[disk] = self.made[name]
                continue
            there = await self._read(vm.namespace, name)
            found[disk] = record = refuse_hold(there, name, vm.namespace, vm.uid)
            if not may_touch(vm.owner, record.owner):
                message = f"the volume {name} does not belong to {vm.owner}; use one that it owns"
                raise VirtbusError(Code.DENIED, "not_owner", message)
        refs = {disk: ref_of(record) for disk, record in found.items()}
        refuse_buffered(vm.spec, refs)
        return Resolved(refs, home_of(found.values()))

    async def writes(self, before: VmRecord | None, after: VmRecord | None) -> list[Write]:
        """Return the writes of volumes that belong to a change of a VM's record.

        Each write expects the revision that was read: if a volume changes meanwhile, the batch
        fails.
        """
        old = before.volume_refs if before is not None else {}
        new = after.volume_refs if after is not None else {}
        if not old and not new:
            return []
        kept = {ref.folder for ref in new.values()}
        found = []
        if before is not None:
            gone = [ref for ref in old.values() if ref.folder not in kept]
            found += [await self._free(ref, before.uid, ended=after is None) for ref in gone]
        if after is not None:
            found += [await self._move(self._moved[folder]) for folder in kept & self._moved.keys()]
            taken, larger = _taken(before, after), _larger(before, after)
            found += [await self._hold(ref, after) for ref in self._others(taken)]
            found += [await self._grow(ref, after.uid) for ref in self._others(larger)]
        return [one for one in found if one is not None]

    def _others(self, refs: Iterable[VolumeRef]) -> Iterable[VolumeRef]:
        return [ref for ref in refs if ref.folder not in self._moved]

    async def _move(self, moved: StoredVolume) -> Write:
        """Return the write of a moved volume; raises ConflictError if the volume has changed."""
        record = moved.record
        there = await self._read(record.namespace, record.name)
        if there is None or there.revision != moved.revision:
            msg = f"the volume {record.name} has changed"
            raise ConflictError(msg)
        return _write(record, moved.revision)

    async def _free(self, ref: VolumeRef, vm: str, *, ended: bool) -> Write | None:
        """Return the write that ends the VM's hold; None if no write is needed or possible.

        A hold in an unreadable record stays, so that the volume does not delay the end of its VM.
        `volume.detach` with `gone` repairs the record.
        """
        try:
            there = await self._read(ref.namespace, ref.name)
        except UnreadableValueError as error:
            extra = {"code": "hold_stays", "uid": ref.uid, "vm": vm}
            log.warning("the volume %s keeps its holder: %s", ref.name, error, extra=extra)
            return None
        record = freed(there, ref, vm, ended=ended)
        return None if record is None or there is None else _write(record, there.revision)

    async def _hold(self, ref: VolumeRef, vm: VmRecord) -> Write | None:
        entry = await self._bus.get(subjects.volume_record(ref.namespace, ref.name))
        there, new = stored_in(entry, read_volume), self.made.get(ref.name)
        if there is None and new is not None:
            create_step(None, entry.why.decode(errors="replace") if entry else "", new)
            there = StoredVolume(new, entry.revision if entry else 0)
        record = held(there, ref, vm, self._bus.sources.time_ns())
        if self._living is not None and there is not None:
            await self._living.refuse(ref, vm.uid, there.record.node)
        return None if there is None else _write(record, there.revision)

    async def _grow(self, ref: VolumeRef, vm: str) -> Write | None:
        there = await self._read(ref.namespace, ref.name)
        record = grown(there, ref, vm)
        return None if there is None else _write(record, there.revision)

    async def _read(self, namespace: str, name: str) -> StoredVolume | None:
        entry = await self._bus.get(subjects.volume_record(namespace, name))
        return stored_in(entry, read_volume)


def _taken(before: VmRecord | None, after: VmRecord) -> Iterable[VolumeRef]:
    """Return the volumes that the VM begins to hold, or whose hold changes with the VM's node.

    If the VM loses its node, only the holds of volumes on servers change.
    """
    had = {ref.folder for ref in before.volume_refs.values()} if before is not None else set()
    moved = before is not None and after.node != before.node
    placed = after.node != UNPLACED
    return [
        ref
        for ref in after.volume_refs.values()
        if ref.folder not in had or (moved and (placed or ABILITIES[ref.kind].shared))
    ]


def _larger(before: VmRecord | None, after: VmRecord) -> Iterable[VolumeRef]:
    """Return the kept volumes whose size has grown."""
    had = {} if before is None else {ref.folder: ref for ref in before.volume_refs.values()}
    return [
        ref
        for ref in after.volume_refs.values()
        if ref.folder in had and ref.size_bytes > had[ref.folder].size_bytes
    ]


def _write(record: VolumeRecord, revision: int) -> Write:
    key = subjects.volume_record(record.namespace, record.name)
    return Write(key, encode(record), expect=revision)
