"""Plans the volumes that the create of a VM makes, by the templates in its spec (ADR 0072)."""

import uuid
from collections.abc import Awaitable, Callable

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.image_names import ImageNameReads
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.controller.edge.volume_room import VolumeRoom
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_spec import VolumeSpec

Planned = Callable[[VolumeRecord, str], Awaitable[VolumeRecord]]
"""Returns a new volume with its pool and the copy that fills it, for an account."""


class VolumeTemplates:
    """Reads which volumes of a VM's templates exist, and plans the others."""

    def __init__(self, bus: Bus, fleet: Fleet, room: VolumeRoom, planned: Planned) -> None:
        self._bus = bus
        self._fleet = fleet
        self._room = room
        self._planned = planned
        self._writes = VolumeWrites(bus)
        self._images = ImageNameReads(bus, fleet)

    async def holders(self, vm: VmRecord, account: str) -> VolumeHolders:
        """Return the holders of the VM's volumes, with those that its create makes.

        Raises:
            VirtbusError: as `VolumeApi.create`; 403 `not_owner`: accounts of bridges make no
                volumes.
        """
        made: dict[str, VolumeRecord] = {}
        is_repeat = vm.uid in self._fleet.vms
        for one in () if is_repeat else vm.spec.volumes:
            if one.volume is not None and one.volume.template is not None:
                name = one.volume.name
                if await self._writes.latest(vm.namespace, name) is None:
                    made[name] = await self._new(vm, name, one.volume.template, account)
        if made:
            self._room.refuse_more(*made.values())
        return VolumeHolders(self._bus, made)

    async def _new(self, vm: VmRecord, name: str, spec: VolumeSpec, account: str) -> VolumeRecord:
        if vm.owner:
            message = f"{vm.owner} has no volumes; leave the template of {name} out"
            raise VirtbusError(Code.DENIED, "not_owner", message)
        ref = spec.source.image
        record = VolumeRecord(
            uid=uid_of(vm.uid, name),
            namespace=vm.namespace,
            name=name,
            spec=spec,
            target=await self._images.of_ref(ref, vm.namespace) if ref else None,
            made_for=vm.uid,
            created_ns=vm.created_ns,
        )
        return await self._planned(record, account)


def uid_of(vm: str, name: str) -> str:
    """Return the uid of the volume `name` that the VM of the uid `vm` makes.

    A repeated create makes the same volume, and after the volume's delete none.
    """
    return str(uuid.uuid5(uuid.UUID(vm), name))
