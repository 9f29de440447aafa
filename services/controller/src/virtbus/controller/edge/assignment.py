"""Moves a VM's record to another node (ADR 0014).

The VM's secrets are copied first. Then one atomic batch purges the old record and puts the new one.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from virtbus.bus.client.ports import Bus, Entry, EntryKind, Write
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.evacuation import moved
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm, StoredVolume
from virtbus.controller.edge.cas import MARKER_TTL_S
from virtbus.controller.edge.commit import Fenced, guarded
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.reservations import NodeFullError, Reservations
from virtbus.controller.edge.volume_holders import NOTHING_MOVED, VolumeHolders
from virtbus.schemas import subjects
from virtbus.schemas.secrets_in_force import in_force
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)


class _Secret(NamedTuple):
    """A VM's secrets, with the revisions of their copies at the old and the new node's key."""

    value: bytes
    old: int
    new: int


class Assignment:
    """Moves records between nodes. Repeats, and several controllers at once, are safe."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        living: LivingVolumes | None = None,
        moved: Mapping[str, StoredVolume] = NOTHING_MOVED,
    ) -> None:
        """`living` and `moved` have the same meaning as in `VolumeHolders`."""
        self._bus = bus
        volumes = VolumeHolders(bus, living=living, moved=moved)
        self._reservations = Reservations(bus, fleet, volumes)

    async def move(self, held: StoredVm, node: str, *, fence: Fenced | None = None) -> StoredVm:
        """Move the record to `node` under a higher epoch; return the new record.

        With `fence`, which `commit.guarded` describes, the batch also puts the fenced node's
        desired state again. Its revision is two below the new record's. If `node` is the record's
        present node, no batch is needed, and `fence` has no effect.

        Raises:
            NodeFullError: the VM reserves capacity, and the node has none left.
            ConflictError: record, fence or target has changed; nothing was moved.
            BusError: nothing happened, or the outcome is unknown.
        """
        record = moved(held.record, node)
        secret = await self._bring(held.record, node)
        try:
            revision = await self._write(held, record, fence)
        except (ConflictError, NodeFullError):
            await self._take_back(record, secret)
            raise
        try:
            await self._settle(held.record, record, secret)
        except BusError as error:
            extra = {"code": "secret_left", "uid": record.uid}
            log.info("left to the sweep: %s", error, extra=extra)
        return StoredVm(record, revision)

    async def _write(self, held: StoredVm, record: VmRecord, fence: Fenced | None) -> int:
        old_key = subjects.vm_record(held.record.node, record.uid)
        new_key = subjects.vm_record(record.node, record.uid)
        if old_key == new_key:
            return await self._bus.put(new_key, encode(record), expect=held.revision)
        there = await self._bus.get(new_key)
        if there is not None and there.kind is EntryKind.PUT:
            msg = f"{new_key} is there already"
            raise ConflictError(msg)
        writes = guarded(
            fence,
            Write(old_key, None, held.revision, ttl_s=MARKER_TTL_S),
            Write(new_key, encode(record), there.revision if there else 0),
        )
        return await self._reservations.write(held.record, record, writes)

    # --- its secrets ----------------------------------------------------------------------
    async def _bring(self, record: VmRecord, node: str) -> _Secret | None:
        """Copy the secrets to the new node's key before the record, because the node needs both."""
        if record.sec_digest is None or node == record.node:
            return None
        entry = await self._bus.get(subjects.vm_secret(record.node, record.uid))
        if entry is None or entry.kind is EntryKind.PURGE:
            return None
        new = await self._bus.put(subjects.vm_secret(node, record.uid), entry.value)
        return _Secret(entry.value, entry.revision, new)

    async def _take_back(self, record: VmRecord, secret: _Secret | None) -> None:
        """Remove the copied secrets after a failed move, unless the record is on that node."""
        if secret is None:
            return
        try:
            last = await self._bus.get(subjects.vm_anywhere(record.uid))
            if last is None or last.key != subjects.vm_record(record.node, record.uid):
                await self._purge(subjects.vm_secret(record.node, record.uid), secret.new)
        except BusError as error:
            extra = {"code": "secret_left", "uid": record.uid}
            log.info("left to the sweep: %s", error, extra=extra)

    async def _settle(self, old: VmRecord, new: VmRecord, secret: _Secret | None) -> None:
        """Write the new copy of the secrets again, and then remove the old copy.

        A sweep that saw the new copy before the move took the copy for an orphan. That sweep's
        purge expects the copy's first revision. So the purge fails after this write.
        """
        if secret is None:
            return
        await self._bus.put(subjects.vm_secret(new.node, new.uid), secret.value)
        await self._purge(subjects.vm_secret(old.node, old.uid), secret.old)

    async def _purge(self, key: str, revision: int) -> None:
        """Purge only the known revision, because the VM may have come back meanwhile."""
        await self._bus.purge(key, expect=revision, marker_ttl_s=MARKER_TTL_S)

    async def rescue(self, orphan: Entry, record: VmRecord) -> None:
        """Copy an orphan secret to its VM's node, if `record` needs it and that node lacks it."""
        if in_force(orphan.key, orphan.value, record.sec_digest or "") is None:
            return
        key = subjects.vm_secret(record.node, record.uid)
        entry = await self._bus.get(key)
        if entry is None or entry.kind is EntryKind.PURGE:
            await self._bus.put(key, orphan.value, expect=entry.revision if entry else 0)
