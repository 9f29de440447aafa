"""Writes volumes to the bus: each create, change and end is one compare-and-set (ADR 0045)."""

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_changes import CreateStep, create_step
from virtbus.controller.core.volume_holds import restored, sized
from virtbus.controller.edge.cas import ATTEMPTS, MARKER_TTL_S, contended
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas import subjects
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import encode


class VolumeWrites:
    """The controller's writes of volumes that concern no VM."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(self, record: VolumeRecord) -> tuple[StoredVolume, bool]:
        """Write a new volume; return it, and False if it existed, unchanged.

        Raises:
            VirtbusError: as `create_step`; 503 too many lost races.
            BusError: nothing happened, or the outcome is unknown.
        """
        key, expect = _key(record), 0
        for _ in range(ATTEMPTS):
            try:
                revision = await self._bus.put(key, encode(record), expect=expect)
                return StoredVolume(record, revision), True
            except ConflictError:
                entry = await self._bus.get(key)
            held = stored_in(entry, read_volume)
            ended = entry.why.decode(errors="replace") if entry is not None else ""
            step = create_step(held.record if held else None, ended, record)
            if step is CreateStep.SAME and held is not None:
                return held, False
            expect = entry.revision if entry is not None else 0
        raise contended(f"the volume {record.name}")

    async def restore(self, vm: VmRecord) -> None:
        """Write the volumes of a VM's record that the bus has lost, or has at an earlier size.

        Raises:
            VirtbusError: as `create`, such as 410 for a deleted volume; 422 `unreadable`.
            ConflictError: a volume changed meanwhile.
        """
        for ref in vm.volume_refs.values():
            held = await self.latest(ref.namespace, ref.name)
            if held is None:
                await self.create(restored(ref, vm, self._bus.sources.time_ns()))
            elif held.record.uid == ref.uid and held.record.spec.size < ref.size_bytes:
                await self.replace(held, sized(held.record, ref.size_bytes))

    async def latest(self, namespace: str, name: str) -> StoredVolume | None:
        """Return a volume from the stream's leader; raises UnreadableValueError."""
        entry = await self._bus.get(subjects.volume_record(namespace, name))
        return stored_in(entry, read_volume)

    async def replace(self, held: StoredVolume, record: VolumeRecord) -> StoredVolume:
        """CAS the volume over the revision that was read; raises ConflictError if it changed."""
        revision = await self._bus.put(_key(record), encode(record), expect=held.revision)
        return StoredVolume(record, revision)

    async def end(self, held: StoredVolume) -> int:
        """Purge the volume at the revision that was read; raises ConflictError if it changed.

        The marker has the uid, so that a late create of it is refused.
        """
        record = held.record
        return await self._bus.purge(
            _key(record), expect=held.revision, marker_ttl_s=MARKER_TTL_S, why=record.uid.encode()
        )


def _key(record: VolumeRecord) -> str:
    return subjects.volume_record(record.namespace, record.name)
