"""The agent's port for disks of running guests, over a simulated host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tests.sim.hostports import Threads
from tests.sim.loop import Process
from tests.sim.machine import Domain, Host, volumes_in

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.plugs import GuestDevices
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.simulator.memory_files import NoDisks

Result = TypeVar("Result")
REFUSES = 0.3
"""The probability that a guest does not answer a request to release a disk."""


class SimDisks(NoDisks):
    """Implements `DiskFiles`: a volume is open while a guest of the host has it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        guests = [
            domain
            for other, domain in self._host.domains.items()
            if domain.active and (other == uid or not ref.shared)
        ]
        return any(ref.folder in guest.volumes.values() for guest in guests)


class SimPlugs:
    """Implements `DiskPlugs`. The threads of a dead agent end their calls."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._threads = Threads(host, process)

    async def devices(self, uid: str) -> GuestDevices | None:
        def read(guest: Domain) -> GuestDevices:
            return GuestDevices(frozenset(guest.volumes), root_ports=99, has_scsi=True)

        return await self._threads.on_guest(uid, read)

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        def write(guest: Domain) -> None:
            if guest.metadata is not None:
                known = guest.metadata
                guest.metadata = dataclasses.replace(known, addresses=addresses, disks=disks)

        await self._threads.on_guest(uid, write)

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        def plug(guest: Domain) -> None:
            for alias, folder in volumes_in(devices[-1]).items():
                if alias in guest.volumes:
                    message = "attach the disk: the device is there already"
                    raise VirtbusError(Code.INTERNAL, "libvirt_failed", message)
                guest.volumes[alias] = folder
                self._host.watcher.volume_opened(self._host, guest, folder)

        await self._threads.on_guest(uid, plug)

    async def detach(self, uid: str, alias: str) -> None:
        def unplug(guest: Domain) -> None:
            answers = self._host.rng.random() > REFUSES
            if answers and guest.state is DomainState.RUNNING:
                guest.volumes.pop(alias, None)

        await self._threads.on_guest(uid, unplug)

    async def close_left(self, uid: str) -> None:
        """Do nothing: these guests leave no file open."""

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        await self._threads.on_guest(uid, lambda _guest: None)
