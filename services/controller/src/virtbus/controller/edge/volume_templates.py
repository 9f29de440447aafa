"""Plans the volumes that a VM's create makes from the templates in the VM's spec (ADR 0072)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from virtbus.bus.client.owners import node_of
from virtbus.bus.client.ports import Bus
from virtbus.controller.core.bare_vms import is_bare
from virtbus.controller.core.demand import demand_of_vm
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.pools import needs_of
from virtbus.controller.core.volume_holds import uid_of
from virtbus.controller.core.volume_placement import Home, place_near
from virtbus.controller.edge.image_names import ImageNameReads
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.controller.edge.volume_room import VolumeRoom
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import NamedVolume
from virtbus.schemas.volume_spec import Retention, VolumeSource, VolumeSpec

Planned = Callable[[VolumeRecord, str], Awaitable[VolumeRecord]]
"""Returns the given new volume with its pool's kind, and with the operation that fills it.

The string is the account of the request.
"""


class VolumeTemplates:
    """Plans the volumes of a VM's templates that do not exist yet."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        room: VolumeRoom,
        planned: Planned,
        living: LivingVolumes,
        *,
        strict: bool,
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._room = room
        self._planned = planned
        self._living = living
        self._strict = strict
        self._writes = VolumeWrites(bus)
        self._images = ImageNameReads(bus, fleet)

    async def holders(self, vm: VmRecord, account: str) -> VolumeHolders:
        """Return a VolumeHolders for the VM, with the volumes that the VM's create makes.

        Raises:
            VirtbusError: 403 `not_owner`: the VM's owner is a bridge or a runtime, and may not make
                this volume. 409 `access_differs`: a volume of that name exists, and its access
                differs from the template's. The errors of `VolumeApi.create`.
        """
        new: dict[str, VolumeRecord] = {}
        known, node = self._fleet.vms.get(vm.uid), ""
        is_repeat = known is not None and not is_bare(known.record)
        named = [one.volume for one in vm.spec.volumes if one.volume is not None]
        makes = any(one.template is not None for one in named)
        for one in named if makes and not is_repeat else ():
            there = await self._writes.latest(vm.namespace, one.name)
            if there is not None:
                _refuse_other_access(one, there.record)
                node = node or there.record.node
            elif one.template is not None:
                new[one.name] = await self._new(vm, one.name, one.template)
        made: dict[str, VolumeRecord] = {}
        for name in sorted(new, key=lambda name: _copies_image(new[name].spec)):
            record = new[name]
            if _copies_image(record.spec):  # any other copy stays on the node of its source
                node = node or self._node_for(vm, new.values())
                record = record.model_copy(update={"node": node})
            made[name] = await self._planned(record, account)
            node = node or made[name].node
        if made:
            self._room.refuse_more(*made.values())
        return VolumeHolders(self._bus, made, self._living)

    def _node_for(self, vm: VmRecord, new: Iterable[VolumeRecord]) -> str:
        """Return the best node for the VM and its new volumes; empty if no node has room now."""
        nodes = self._fleet.candidates(asyncio.get_running_loop().time())
        home = Home("", "", needs_of(map(self._fleet.pools.admitted, new)))
        found = place_near(vm.spec, nodes, home, strict=self._strict, want=demand_of_vm(vm))
        return next(iter(found.best), "")

    async def _new(self, vm: VmRecord, name: str, spec: VolumeSpec) -> VolumeRecord:
        if vm.owner and not self._assigned(vm, name, spec):
            raise _denied(vm, name, spec.pool)
        ref = spec.source.image
        return VolumeRecord(
            uid=uid_of(vm.uid, name),
            namespace=vm.namespace,
            name=name,
            spec=spec,
            target=await self._images.of_ref(ref, vm.namespace) if ref else None,
            made_for=vm.uid,
            created_ns=vm.created_ns,
            owner=vm.owner,
        )

    def _assigned(self, vm: VmRecord, name: str, spec: VolumeSpec) -> bool:
        """Return True for an empty volume that the runtime's node assigns in its pools.toml.

        The retention must be Delete. Then the record of the volume is deleted with the VM, and the
        runtime needs no right to delete volumes. The data stays on the storage server.
        """
        pool = self._fleet.pools.of(node_of(vm.owner)).get(spec.pool)
        if pool is None or not ABILITIES[pool.kind].shared or spec.source != VolumeSource():
            return False
        ends = spec.retention is Retention.DELETE and not spec.protected
        return ends and f"{vm.namespace}.{name}" in pool.assigned


def _refuse_other_access(wanted: NamedVolume, there: VolumeRecord) -> None:
    """Raise 409 `access_differs` if the existing volume has another access than the template.

    If a volume is shared, a guest with an ordinary file system destroys the writes of other guests.
    """
    if wanted.template is not None and wanted.template.access is not there.spec.access:
        message = (
            f"the volume {there.name} exists, and its access is {there.spec.access}; use another "
            "name, or that access in the template"
        )
        detail = Detail(path=f"volume/{there.name}", message="has another access")
        raise VirtbusError(Code.CONFLICT, "access_differs", message, details=(detail,))


def _denied(vm: VmRecord, name: str, pool: str) -> VirtbusError:
    message = f"{vm.owner} makes no volumes; leave the template of {name} out"
    if home := node_of(vm.owner):
        message = (
            f"{vm.owner} makes only empty volumes on servers that the pools of {home} assign, with "
            f"the retention Delete; assign {vm.namespace}.{name} in pools.toml of {home} "
            f"(pools.{pool}.volumes), and restart virtbus-imaged and virtbus-nodeagent there"
        )
    return VirtbusError(Code.DENIED, "not_owner", message)


def _copies_image(spec: VolumeSpec) -> bool:
    return spec.is_copied and spec.source.image is not None
