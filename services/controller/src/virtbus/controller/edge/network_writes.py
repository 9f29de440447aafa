"""Writes networks to the bus, and restores lost networks from the records of their VMs."""

import logging

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.network_changes import create_step, restored
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.records import read_network
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)


class NetworkWrites(NamedWrites[NetworkRecord]):
    """Reads and writes networks, and restores lost networks."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, "network", subjects.network_record, read_network, create_step)

    async def restore(self, vm: VmRecord) -> None:
        """Write the networks of a VM's record that the bus has lost; raises BusError.

        A VM runs without the object of its network. Therefore a restore is only logged if it fails,
        because another network has the name or because the uid was deleted.
        """
        for target in vm.network_targets.values():
            try:
                if await self.latest(target.namespace, target.name) is None:
                    await self.create(restored(target, self._bus.sources.time_ns()))
            except (VirtbusError, ConflictError) as error:
                extra = {"code": "network_not_restored", "uid": vm.uid}
                log.warning("network %s stays lost: %s", target.name, error, extra=extra)
