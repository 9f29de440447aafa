"""Writes records of volumes, and restores lost records from the records of their VMs."""

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.volume_changes import create_step
from virtbus.controller.core.volume_holds import as_held, restored
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord


class VolumeWrites(NamedWrites[VolumeRecord]):
    """Writes a volume's record alone, without the record of a VM in the same batch."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, "volume", subjects.volume_record, read_volume, create_step)

    async def restore(self, vm: VmRecord) -> None:
        """Write those records of a VM's volumes that are missing, or older, on the bus.

        Raises:
            VirtbusError: 422 `unreadable`: the record on the bus cannot be read. The errors of
                `create`, such as 410 for a deleted volume.
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
