"""Ends guests for the node's own container runtime while the bus is away.

While the bus is away, nobody can change the record, in which the VM runs. So only VMs with the run
strategy `Manual` are ended, because the agent does not start such a guest again. The runtime
changes the record when the bus is back.

If the agent was started while the bus is away, it has no actors. This module then reads the VM's
owner from the copy of the record on disk, and asks libvirt if the VM runs.
"""

import asyncio
import logging
from collections.abc import Mapping

from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.bus.runtime.sources import REAL
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.core.freezes import Freezes
from virtbus.nodeagent.core.ports import Ending, Hypervisor, RecordFiles
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.machine import UP, WAY_DOWN
from virtbus.nodeagent.vm.operations.stop import shutdown
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.vm import RunStrategy

log = logging.getLogger(__name__)

LOOK_S = 0.1
DESTROY_S = 20.0
"""Time limit for libvirt's report that a destroyed guest has ended."""
START_S = 20.0
"""Time limit of the wait for a start in progress. The agent would repeat an interrupted start."""


class LocalEnds:
    """Answers the node's container runtime, also before the agent has reached the bus."""

    def __init__(self, hypervisor: Hypervisor, freezes: Freezes, records: RecordFiles) -> None:
        self._hypervisor = hypervisor
        self._freezes = freezes
        self._records = records
        self.guests: Mapping[str, VmActor] = {}
        """The agent's actors, by uid. The map is empty until the agent has reached the bus."""
        self._running: set[asyncio.Future[None]] = set()

    async def end(self, want: LocalEnd) -> LocalEnded:
        """Ask a guest by ACPI to end, and destroy it after its grace. The call can be repeated.

        Raises:
            VirtbusError: 404 `vm_not_here`: the node has no such VM. 403 `not_its_vm`: the owner
                differs, or the run strategy is not `Manual`. 504 `end_slow`: the guest still
                starts, or still runs after its destroy. Also the errors of libvirt.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(done)
        try:
            return await self._end(want)
        finally:
            self._running.discard(done)
            done.cancel()

    async def idle(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    async def _end(self, want: LocalEnd) -> LocalEnded:
        await self._check(want)
        began_s = asyncio.get_running_loop().time()
        await self._started(want.uid, began_s + START_S)
        if want.grace_s and await self._up(want.uid):
            ended = SmallEvent()
            async with background() as tasks:
                tasks.start(self._ask(want.uid, ended))
                await self._until_down(want.uid, began_s + want.grace_s)
                ended.set()
        if await self._up(want.uid):
            await self._hypervisor.destroy(want.uid)
            now_s = asyncio.get_running_loop().time()
            if not await self._until_down(want.uid, now_s + DESTROY_S):
                message = f"the guest of {want.uid} has not ended {DESTROY_S:g} s after its destroy"
                raise VirtbusError(Code.DEADLINE, "end_slow", message)
        log.info("guest ended for the container runtime", extra={"uid": want.uid})
        return LocalEnded(last_exit=await self._last_exit(want.uid))

    async def _last_exit(self, uid: str) -> GuestExit | None:
        """Return the guest's exit; None if it is unknown.

        Without an actor, the exit comes from libvirt, and its time is the time of this call.
        """
        guest = self.guests.get(uid)
        if guest is not None:
            return guest.vm.observed.last_exit
        domain = await self._hypervisor.facts(uid)
        if domain is None or domain.ending is Ending.UNKNOWN:
            return None
        return GuestExit(how=domain.ending.value, asked=True, at_ns=REAL.time_ns())

    async def _ask(self, uid: str, ended: SmallEvent) -> None:
        await shutdown(uid, self._hypervisor, self._freezes, ended)

    async def _check(self, want: LocalEnd) -> None:
        guest = self.guests.get(want.uid)
        record = guest.vm.record if guest else (await self._records.list()).get(want.uid)
        if record is None:
            message = f"VM {want.uid} is not on this node"
            raise VirtbusError(Code.NOT_FOUND, "vm_not_here", message)
        if record.owner != want.owner or record.spec.run_strategy is not RunStrategy.MANUAL:
            message = f"VM {want.uid} is not one of the container runtime; use `virtbus vm stop`"
            raise VirtbusError(Code.DENIED, "not_its_vm", message)

    async def _started(self, uid: str, deadline_s: float) -> None:
        """Wait until no start is in progress; raise 504 `end_slow` at the deadline."""
        while (guest := self.guests.get(uid)) is not None and guest.vm.phase == "starting":
            if asyncio.get_running_loop().time() >= deadline_s:
                message = f"the guest of {uid} still starts; it is ended on a repeat"
                raise VirtbusError(Code.DEADLINE, "end_slow", message)
            await asyncio.sleep(LOOK_S)

    async def _up(self, uid: str) -> bool:
        guest = self.guests.get(uid)
        if guest is not None:
            return guest.vm.phase in UP | WAY_DOWN
        domain = await self._hypervisor.facts(uid)
        return domain is not None and domain.active

    async def _until_down(self, uid: str, deadline_s: float) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            up = await self._up(uid)
            if not up or loop.time() >= deadline_s:
                return not up
            await asyncio.sleep(LOOK_S)
