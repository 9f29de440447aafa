"""Pauses or resumes a guest's CPUs."""

from virtbus.nodeagent.core.ports import DomainFacts, Hypervisor


async def pause(uid: str, hypervisor: Hypervisor, *, paused: bool) -> DomainFacts | None:
    """Pause or resume the guest; return the new facts of its domain, None if it has none."""
    if paused:
        await hypervisor.suspend(uid)
    else:
        await hypervisor.resume(uid)
    return await hypervisor.facts(uid)
