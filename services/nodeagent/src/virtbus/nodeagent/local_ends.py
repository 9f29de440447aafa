"""Ends guests for the node's own container runtime while the bus is away.

The record keeps its desired state. So only VMs of the run strategy `Manual` are ended: the agent
starts no such guest a second time. The runtime changes the record when the bus is back.
"""

import asyncio
import logging
from collections.abc import Mapping

from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.core.freezes import Freezes
from virtbus.nodeagent.core.ports import Hypervisor
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.machine import UP
from virtbus.nodeagent.vm.operations.stop import shutdown
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.vm import RunStrategy

log = logging.getLogger(__name__)

LOOK_S = 0.1
DESTROY_S = 20.0
"""The time in which libvirt reports the end of a destroyed guest."""


class LocalEnds:
    """Answers requests of the node's container runtime. `guests` is the agent's own map."""

    def __init__(
        self, hypervisor: Hypervisor, freezes: Freezes, guests: Mapping[str, VmActor]
    ) -> None:
        self._hypervisor = hypervisor
        self._freezes = freezes
        self._guests = guests

    async def end(self, want: LocalEnd) -> LocalEnded:
        """End a guest: ask it by ACPI, and destroy it after its grace. Repeatable.

        Raises:
            VirtbusError: 404 `vm_not_here`; 403 `not_its_vm`; 504 `end_slow`; libvirt's refusal.
        """
        self._check(want)
        began_s = asyncio.get_running_loop().time()
        if want.grace_s and self._up(want.uid):
            ended = SmallEvent()
            async with background() as tasks:
                tasks.start(self._ask(want.uid, ended))
                await self._until_down(want.uid, began_s + want.grace_s)
                ended.set()
        if self._up(want.uid):
            await self._hypervisor.destroy(want.uid)
            now_s = asyncio.get_running_loop().time()
            if not await self._until_down(want.uid, now_s + DESTROY_S):
                message = f"the guest of {want.uid} has not ended {DESTROY_S:g} s after its destroy"
                raise VirtbusError(Code.DEADLINE, "end_slow", message)
        log.info("guest ended for the container runtime", extra={"uid": want.uid})
        guest = self._guests.get(want.uid)
        return LocalEnded(last_exit=guest.vm.observed.last_exit if guest is not None else None)

    async def _ask(self, uid: str, ended: SmallEvent) -> None:
        await shutdown(uid, self._hypervisor, self._freezes, ended)

    def _check(self, want: LocalEnd) -> None:
        guest = self._guests.get(want.uid)
        if guest is None:
            message = f"VM {want.uid} is not on this node, or its agent has not read its records"
            raise VirtbusError(Code.NOT_FOUND, "vm_not_here", message)
        record = guest.vm.record
        if record.owner != want.owner or record.spec.run_strategy is not RunStrategy.MANUAL:
            message = f"VM {want.uid} is not one of the container runtime; use `virtbus vm stop`"
            raise VirtbusError(Code.DENIED, "not_its_vm", message)

    def _up(self, uid: str) -> bool:
        guest = self._guests.get(uid)
        return guest is not None and guest.vm.phase in UP

    async def _until_down(self, uid: str, deadline_s: float) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            if not self._up(uid) or loop.time() >= deadline_s:
                return not self._up(uid)
            await asyncio.sleep(LOOK_S)
