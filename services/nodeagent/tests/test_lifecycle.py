"""The table of a VM's life on its node: every row, and the user-visible state of each phase."""

import pytest

from virtbus.nodeagent.core.lifecycle import (
    ALIVE,
    BY_STRATEGY,
    TABLE,
    Action,
    Event,
    Phase,
    backoff_s,
    step,
)
from virtbus.nodeagent.core.ports import DomainFacts, DomainState, Ending
from virtbus.nodeagent.core.recovery import found, missed
from virtbus.schemas.vm import RunStrategy

STRATEGIES = [str(s) for s in RunStrategy]


@pytest.mark.parametrize(("phase", "event"), TABLE, ids=lambda v: str(v).replace(" ", "-"))
def test_every_row_decides_its_case(phase: Phase, event: Event) -> None:
    assert step(phase, event, "Always") == TABLE[phase, event]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(Event))
def test_an_event_without_a_row_changes_nothing(phase: Phase, event: Event, strategy: str) -> None:
    if (phase, event) in TABLE or (phase in ALIVE and (strategy, event) in BY_STRATEGY):
        return
    assert step(phase, event, strategy) == (phase, ())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_row_for_each_ending(strategy: str) -> None:
    for event in (Event.SHUT_DOWN, Event.ENDED, Event.CRASHED):
        assert (strategy, event) in BY_STRATEGY


def test_a_delete_completes_from_every_phase() -> None:
    for phase in set(Phase) - {Phase.RELEASING, Phase.RELEASED, Phase.GONE}:
        after, _ = step(phase, Event.DELETE, "Always")
        assert after in {Phase.ENDING, Phase.RELEASING}, phase
    assert step(Phase.ENDING, Event.ENDED, "Always")[0] is Phase.RELEASING
    assert step(Phase.RELEASING, Event.RELEASED, "Always")[0] is Phase.RELEASED
    assert step(Phase.RELEASED, Event.PURGED, "Always")[0] is Phase.GONE


def test_no_disk_is_released_under_a_guest() -> None:
    """RELEASE is only reached through a phase in which no guest can run."""
    alive = {Phase.STARTING, Phase.RUNNING, Phase.PAUSED, Phase.STOPPING}
    for (phase, event), (_, actions) in TABLE.items():
        if Action.RELEASE in actions:
            assert phase not in alive, (phase, event)


def test_every_phase_is_reached() -> None:
    rows = [*TABLE.values(), *BY_STRATEGY.values()]
    assert {phase for phase, _ in rows} | {Phase.NEW} == set(Phase)


def test_every_action_is_used() -> None:
    rows = [*TABLE.values(), *BY_STRATEGY.values()]
    assert {action for _, actions in rows for action in actions} == set(Action)


def test_backoff_doubles_to_a_minute() -> None:
    assert [backoff_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def facts(state: DomainState, ending: Ending = Ending.UNKNOWN) -> DomainFacts:
    return DomainFacts("u", state, ending)


def test_a_running_domain_is_adopted_never_started_again() -> None:
    event = found(facts(DomainState.RUNNING), powered=True)
    assert event is Event.STARTED
    assert step(Phase.NEW, event, "Always") == (Phase.RUNNING, ())


def test_a_start_in_progress_is_awaited() -> None:
    event = found(facts(DomainState.STARTING), powered=True)
    assert event is Event.FOUND_STARTING
    assert step(Phase.NEW, event, "Always") == (Phase.STARTING, (Action.AWAIT_START,))


def test_the_record_decides_about_a_domain_that_never_ran() -> None:
    assert found(facts(DomainState.SHUT_OFF), powered=True) is None
    assert found(None, powered=True) is None


def test_a_guest_that_ended_while_the_agent_was_down_follows_its_strategy() -> None:
    event = found(facts(DomainState.SHUT_OFF, Ending.SHUT_DOWN), powered=True)
    assert event is Event.SHUT_DOWN
    assert step(Phase.NEW, event, "Once")[0] is Phase.SUCCEEDED
    assert step(Phase.NEW, event, "Always")[0] is Phase.WAITING


@pytest.mark.parametrize(
    ("phase", "state", "event"),
    [
        (Phase.RUNNING, None, Event.ENDED),
        (Phase.RUNNING, DomainState.SHUT_OFF, Event.ENDED),
        (Phase.RUNNING, DomainState.PAUSED, Event.PAUSED),
        (Phase.PAUSED, DomainState.RUNNING, Event.RESUMED),
        (Phase.STOPPED, DomainState.RUNNING, Event.STARTED),
        (Phase.RUNNING, DomainState.RUNNING, None),
        (Phase.PREPARING, None, None),
        (Phase.STARTING, DomainState.SHUT_OFF, None),
    ],
)
def test_a_lost_event_is_corrected_by_comparison(
    phase: Phase, state: DomainState | None, event: Event | None
) -> None:
    assert missed(phase, facts(state) if state else None) is event
