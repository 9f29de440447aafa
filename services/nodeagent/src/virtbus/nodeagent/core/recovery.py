"""Derives the initial event of an adopted VM from its libvirt domain (I16)."""

from virtbus.nodeagent.core.lifecycle import ENDINGS, Event, Phase
from virtbus.nodeagent.core.ports import DomainFacts, DomainState, Ending
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy, VmRecord, VmStatus

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

ONCE_ONLY = frozenset({RunStrategy.ONCE, RunStrategy.MANUAL, RunStrategy.HALTED})
"""Strategies that do not start a guest again after it ended by itself, or with its host."""
WAS_UP = frozenset({VmState.RUNNING, VmState.PAUSED})
DOWN = frozenset({Phase.STOPPED, Phase.SUCCEEDED, Phase.FAILED, Phase.BACKING_OFF})


def found(facts: DomainFacts | None, *, powered: bool) -> Event | None:
    """Return the event for a domain at the agent's start; None leaves it to the record.

    A shut-off domain counts as an end only if the record wants it to run. An agent that died
    between define and create leaves a domain that never ran, with an unknown end.
    """
    if facts is None:
        return None
    if facts.state is not DomainState.SHUT_OFF:
        return FOUND[facts.state]
    return ENDED.get(facts.ending) if powered else None


def started_for(facts: DomainFacts | None, first: Event, record: VmRecord) -> int:
    """Return the power epoch that a found domain has acted on.

    A domain that ended, and was defined for an earlier start, has not acted on later starts.
    """
    metadata = facts.metadata if facts is not None else None
    if first not in ENDINGS or metadata is None or metadata.power_epoch < 0:
        return record.power_epoch
    return metadata.power_epoch


def missed(phase: Phase, facts: DomainFacts | None) -> Event | None:
    """Return the event that was missed by a guest in `phase`, from its domain now."""
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


def ended_before(told: VmStatus | None, record: VmRecord, found: Event | None) -> Event | None:
    """Return how the guest ended, from its last status, if its domain does not show it.

    libvirt forgets why a domain is shut off when it, or the host, restarts. Without this function
    a guest that powered itself off, or that should run only once, would be started again.
    If the last status shows a running guest of the last start, the domain's end is its end. The
    domain may have been defined for an earlier start.
    """
    if told is None or not record.powered or record.ending:
        return None
    if told.power_epoch != record.power_epoch:
        return None
    if told.state is VmState.SUCCEEDED:
        return Event.SHUT_DOWN
    if told.state in WAS_UP and found in ENDINGS:
        return found
    once = record.spec.run_strategy in ONCE_ONLY
    return Event.CRASHED if once and (told.ended or told.state in WAS_UP) else None


def untold(record: VmRecord) -> Event | None:
    """Return the same if the last status is unreadable: a run-once guest may have run."""
    asked = record.powered and not record.ending
    return Event.CRASHED if asked and record.spec.run_strategy in ONCE_ONLY else None
