"""Writes volumes to the bus, also those that the bus has lost and a VM's record describes."""

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.volume_changes import create_step
from virtbus.controller.core.volume_holds import as_held, restored
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord


class VolumeWrites(NamedWrites[VolumeRecord]):
    """The controller's writes of volumes that change no VM's record."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, "volume", subjects.volume_record, read_volume, create_step)

    async def restore(self, vm: VmRecord) -> None:
        """Write the volumes of a VM's record that the bus has lost, or has as they were earlier.

        Raises:
            VirtbusError: as `create`, such as 410 for a deleted volume; 422 `unreadable`.
            ConflictError: a volume changed meanwhile.
        """
        for ref in vm.volume_refs.values():
            held = await self.latest(ref.namespace, ref.name)
            if held is None:
                await self.create(restored(ref, vm, self._bus.sources.time_ns()))
            elif held.record.uid == ref.uid:
                after = as_held(held.record, ref, vm)
                if after != held.record:
                    await self.replace(held, after)
