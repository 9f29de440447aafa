"""Pauses or resumes a guest's CPUs as its record says.

Level-triggered: one task per VM compares guest and record until both agree. Two calls in two
threads could overtake each other.
"""

from typing import TYPE_CHECKING

from virtbus.nodeagent.tools import Tools

if TYPE_CHECKING:
    from virtbus.nodeagent.guest import Guest


async def follow(guest: "Guest", tools: Tools) -> None:
    """Return when the guest matches the record, or is gone; raises VirtbusError."""
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
