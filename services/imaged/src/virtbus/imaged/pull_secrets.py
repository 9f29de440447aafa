"""The logins that VMs bring for their container disks, out of the bus, for as long as a pull."""

import hashlib
from collections.abc import Mapping
from typing import Protocol

from virtbus.bus.ports import BusError, Entry
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import read


class Reader(Protocol):
    """What of the bus is needed."""

    async def get(self, key: str) -> Entry | None: ...


class PullSecrets:
    """Reads `$KV.sec` of this node's VMs. Nothing is kept."""

    def __init__(self, bus: Reader) -> None:
        self._bus = bus

    async def of(self, record: VmRecord) -> Mapping[str, str]:
        """A `config.json` by volume name.

        Raises:
            VirtbusError: 503 `secrets_lost`, `bus_unavailable`.
        """
        if record.sec_digest is None:
            return {}
        try:
            entry = await self._bus.get(subjects.vm_secret(record.node, record.uid))
        except BusError as error:
            message = "the bus does not give the VM's image_pull_secret now; it is asked again"
            raise VirtbusError(Code.UNAVAILABLE, "bus_unavailable", message) from error
        if entry is None or hashlib.sha256(entry.value).hexdigest() != record.sec_digest:
            message = (
                "the bus does not have the VM's image_pull_secret; it is asked again. If it is "
                "lost, create the VM anew with it"
            )
            raise VirtbusError(Code.UNAVAILABLE, "secrets_lost", message)
        return read(VmSecrets, entry.value).image_pull
