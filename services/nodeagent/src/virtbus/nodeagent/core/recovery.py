"""What a VM's actor is told first, from what stands on the host (design §6, I16)."""

from virtbus.nodeagent.core.lifecycle import Event, Phase
from virtbus.nodeagent.core.ports import DomainFacts, DomainState, Ending

FOUND: dict[DomainState, Event] = {
    DomainState.RUNNING: Event.STARTED,
    DomainState.SHUTTING_DOWN: Event.STARTED,
    DomainState.STARTING: Event.FOUND_STARTING,
    DomainState.PAUSED: Event.PAUSED,
}
ENDED: dict[Ending, Event] = {
    Ending.SHUT_DOWN: Event.SHUT_DOWN,
    Ending.ENDED: Event.ENDED,
    Ending.CRASHED: Event.CRASHED,
}

DOWN = frozenset({Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED, Phase.BACKING_OFF})


def found(facts: DomainFacts | None, *, powered: bool) -> Event | None:
    """The event that a domain is at an agent's start; None leaves it to the record alone.

    A shut-off domain counts as an ending only where the record wants it to run: an agent that
    died between define and create leaves one that never ran, with an unknown ending.
    """
    if facts is None:
        return None
    if facts.state is not DomainState.SHUT_OFF:
        return FOUND[facts.state]
    return ENDED.get(facts.ending) if powered else None


def missed(phase: Phase, facts: DomainFacts | None) -> Event | None:
    """What must have happened to a guest that was in `phase`, given its domain now."""
    state = facts.state if facts else DomainState.SHUT_OFF
    if phase in {Phase.RUNNING, Phase.PAUSED} and state is DomainState.SHUT_OFF:
        return ENDED.get(facts.ending if facts else Ending.ENDED, Event.ENDED)
    if phase is Phase.RUNNING and state is DomainState.PAUSED:
        return Event.PAUSED
    if phase is Phase.PAUSED and state is DomainState.RUNNING:
        return Event.RESUMED
    if phase in DOWN and state is DomainState.RUNNING:
        return Event.STARTED
    return None
