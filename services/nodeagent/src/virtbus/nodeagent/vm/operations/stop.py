"""Ends a guest: asks it by ACPI, or destroys its domain."""

import asyncio
import logging

from virtbus.bus.client import tracing
from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.core.freezes import Freezes
from virtbus.nodeagent.core.ports import Hypervisor
from virtbus.nodeagent.vm.machine import MachineEvent
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)


THAW_S = 3.0
"""The longest time that a shutdown waits for a thaw. The grace runs meanwhile."""


PRESS_S = 5.0
"""Time between two ACPI requests. A request is repeated, because a booting guest ignores it."""


async def shutdown(
    uid: str, hypervisor: Hypervisor, freezes: Freezes, ended: SmallEvent
) -> MachineEvent | None:
    """Request a shutdown by ACPI until `ended` is set; return "ended" if no guest runs.

    A frozen guest cannot shut down, so it is thawed first. If libvirt fails, the guest is destroyed
    when the grace expires.
    """
    if freezes.of(uid) is not None:
        try:
            async with asyncio.timeout(THAW_S):
                await freezes.thaw(uid, "stop", timeout_s=THAW_S)
        except (VirtbusError, TimeoutError) as error:
            log.info("not thawed before the shutdown: %s", error, extra={"uid": uid})
    while not ended.is_set():
        try:
            if not await hypervisor.shutdown(uid):
                return "ended"
        except VirtbusError as error:
            log.info("ACPI shutdown: %s", error, extra={"uid": uid})
            return None
        await wait_for_event(ended, PRESS_S)
    return None


async def destroy(
    uid: str, hypervisor: Hypervisor, starting: asyncio.Task[None] | None, *, forced: bool
) -> MachineEvent:
    """End the guest, or the guest that the task `starting` creates; raises VirtbusError."""
    with tracing.span("virtbus end guest", uid=uid):
        await end(uid, hypervisor, starting, forced=forced)
    return "ended"


async def end(
    uid: str, hypervisor: Hypervisor, starting: asyncio.Task[None] | None, *, forced: bool
) -> None:
    """Destroy the guest now, and again after a start that is in flight.

    With `forced`, a guest that libvirt has lost is destroyed, too.

    Raises:
        VirtbusError: 503 `start_under_way`: libvirt may still carry out a start. The errors of
            `Hypervisor.destroy`.
    """
    late = hypervisor.start_under_way(uid)
    await hypervisor.destroy(uid, forced=forced)
    if starting is not None:
        await asyncio.wait({starting})
        late = hypervisor.start_under_way(uid)
        await hypervisor.destroy(uid, forced=forced)
    if late:  # a start that was not over before the last destroy may still create a guest
        message = "libvirt has not ended an earlier start of this VM"
        raise VirtbusError(Code.UNAVAILABLE, "start_under_way", message, after_ms=1000)
