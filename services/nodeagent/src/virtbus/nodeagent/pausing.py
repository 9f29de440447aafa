"""Lets a guest's CPUs stand still or go on, as its record says.

Level-triggered: one task a VM looks at the record until both agree. Two calls in two threads
could else overtake one another.
"""

from typing import TYPE_CHECKING

from virtbus.nodeagent.tools import Tools

if TYPE_CHECKING:
    from virtbus.nodeagent.guest import Guest


async def follow(guest: "Guest", tools: Tools) -> None:
    """Return when the guest is as the record says, or is gone; raises VirtbusError."""
    uid = guest.record.uid
    while True:
        paused = guest.record.paused
        if paused:
            await tools.hypervisor.suspend(uid)
        else:
            await tools.hypervisor.resume(uid)
        guest.compare(await tools.hypervisor.facts(uid))
        if guest.record.paused == paused:
            return
