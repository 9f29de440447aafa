"""Pauses or resumes a guest's CPUs."""

from virtbus.nodeagent.core.ports import DomainFacts, Hypervisor


async def pause(uid: str, hypervisor: Hypervisor, *, paused: bool) -> DomainFacts | None:
    """Return the domain afterwards, which tells the event; raises VirtbusError."""
    if paused:
        await hypervisor.suspend(uid)
    else:
        await hypervisor.resume(uid)
    return await hypervisor.facts(uid)
