"""The table of a VM's life on its node: every row, and the user-visible state of each phase."""

from itertools import product
from typing import get_args

import pytest

from virtbus.nodeagent.core.ports import DomainFacts, DomainState, Ending
from virtbus.nodeagent.vm.machine import (
    ALIVE,
    ALSO,
    AT_REST,
    BY_STRATEGY,
    CONTROL,
    ENTRY,
    EXIT,
    PHASES,
    TABLE,
    Action,
    Control,
    Effect,
    MachineEvent,
    Signal,
    VmPhase,
    accepts,
    control,
    react,
    step,
)
from virtbus.nodeagent.vm.observation import found, missed
from virtbus.nodeagent.vm.operations.outcome import backoff_s
from virtbus.schemas.vm import RunStrategy

STRATEGIES = [str(s) for s in RunStrategy]


@pytest.mark.parametrize(("phase", "event"), TABLE, ids=lambda v: str(v).replace(" ", "-"))
def test_every_row_decides_its_case(phase: VmPhase, event: MachineEvent) -> None:
    assert step(phase, event, "Always") == TABLE[phase, event]


def test_an_event_without_a_row_changes_nothing() -> None:
    for phase, event, strategy in product(PHASES, get_args(MachineEvent), STRATEGIES):
        if (phase, event) in TABLE or (phase in ALIVE and (strategy, event) in BY_STRATEGY):
            continue
        assert step(phase, event, strategy) == (phase, ()), (phase, event, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_row_for_each_ending(strategy: str) -> None:
    for event in ("shut down", "ended", "crashed"):
        assert (strategy, event) in BY_STRATEGY


def test_a_delete_completes_from_every_phase() -> None:
    for phase in set(PHASES) - {"releasing", "released", "gone"}:
        after, _ = step(phase, "delete", "Always")
        assert after in {"ending", "releasing"}, phase
    assert step("ending", "ended", "Always")[0] == "releasing"
    assert step("releasing", "released", "Always")[0] == "released"
    assert step("released", "purged", "Always")[0] == "gone"


def test_no_disk_is_released_under_a_guest() -> None:
    """RELEASE is only reached through a phase in which no guest can run."""
    alive = {"starting", "running", "paused", "stopping"}
    for (phase, event), (_, actions) in TABLE.items():
        if "release" in actions:
            assert phase not in alive, (phase, event)


def test_every_phase_is_reached() -> None:
    rows = [*TABLE.values(), *BY_STRATEGY.values()]
    assert {phase for phase, _ in rows} | {"new"} == set(PHASES)


def test_every_action_is_used() -> None:
    rows = [row for _, row in [*TABLE.values(), *BY_STRATEGY.values()]]
    rows += [*ENTRY.values(), *EXIT.values(), *ALSO.values(), *AT_REST.values(), ("report",)]
    assert {action for actions in rows for action in actions} == set(get_args(Action))


def test_a_step_leaves_enters_acts_reports_and_settles_in_this_order() -> None:
    assert react("running", "crashed", "Manual") == (
        "failed",
        ("unwatch", "stop ending", "report", "settle"),
    )
    assert react("starting", "started", "Always") == (
        "running",
        ("watch", "await stable", "report", "settle"),
    )
    assert react("releasing", "released", "Always") == (
        "released",
        ("report", "replay"),
    )


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "released"])
def test_a_purge_waits_until_the_vm_is_released(phase: VmPhase) -> None:
    assert react(phase, "purged", "Always") == (phase, ("defer purge",))


def test_an_event_that_changes_nothing_is_not_reported() -> None:
    assert react("preparing", "run", "Always") == ("preparing", ())


def test_a_guest_that_starts_while_it_is_ended_ends_once_only() -> None:
    endings: set[MachineEvent] = {"shut down", "ended", "crashed"}
    for phase in ("stopping", "ending"):
        for event in endings:
            assert not accepts(phase, event, starting=True, powered=True)
            assert accepts(phase, event, starting=False, powered=False)


def test_dependencies_of_an_earlier_step_start_nothing() -> None:
    ready: MachineEvent = "dependencies ready"
    for phase in PHASES:
        started = accepts(phase, ready, starting=False, powered=True)
        assert started == (phase == "preparing")
    assert not accepts("preparing", ready, starting=False, powered=False)


def test_every_state_of_control_is_reached_and_every_signal_and_effect_is_used() -> None:
    assert {state for state, _ in CONTROL.values()} | {"following"} == set(get_args(Control))
    assert {signal for _, signal in CONTROL} == set(get_args(Signal))
    assert {effect for _, effects in CONTROL.values() for effect in effects} == set(
        get_args(Effect)
    )


def test_a_hold_applies_nothing_and_its_end_applies_all() -> None:
    applies: set[Effect] = {"apply", "apply or report"}
    for (state, signal), (after, effects) in CONTROL.items():
        if "held" in after and "held" in state:
            assert not applies & set(effects), (state, signal)
        if "held" in state and "held" not in after and signal == "resume":
            assert effects[0] == "replay"


def test_a_hold_ends_no_delete_that_was_accepted() -> None:
    going = {"ending", "releasing", "released", "gone"}
    for phase in PHASES:
        after, _ = control("following", "hold", phase)
        assert after == ("following" if phase in going else "held")


def test_nothing_holds_or_refuses_what_was_terminated() -> None:
    states: tuple[Control, ...] = ("terminated", "recalling, terminated")
    signals: tuple[Signal, ...] = ("hold", "resume", "refuse", "terminate")
    for state in states:
        for signal in signals:
            assert control(state, signal, "running") == (state, ())


def test_backoff_doubles_to_a_minute() -> None:
    assert [backoff_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def facts(state: DomainState, ending: Ending = Ending.UNKNOWN) -> DomainFacts:
    return DomainFacts("u", state, ending)


def test_a_running_domain_is_adopted_never_started_again() -> None:
    event = found(facts(DomainState.RUNNING), powered=True)
    assert event == "started"
    assert step("new", event, "Always") == ("running", ())


def test_a_start_in_progress_is_awaited() -> None:
    event = found(facts(DomainState.STARTING), powered=True)
    assert event == "found starting"
    assert step("new", event, "Always") == ("starting", ("await start",))


def test_the_record_decides_about_a_domain_that_never_ran() -> None:
    assert found(facts(DomainState.SHUT_OFF), powered=True) is None
    assert found(None, powered=True) is None


def test_a_guest_that_ended_while_the_agent_was_down_follows_its_strategy() -> None:
    event = found(facts(DomainState.SHUT_OFF, Ending.SHUT_DOWN), powered=True)
    assert event == "shut down"
    assert step("new", event, "Once")[0] == "succeeded"
    assert step("new", event, "Always")[0] == "waiting"


@pytest.mark.parametrize(
    ("phase", "state", "event"),
    [
        ("running", None, "ended"),
        ("running", DomainState.SHUT_OFF, "ended"),
        ("running", DomainState.PAUSED, "paused"),
        ("paused", DomainState.RUNNING, "resumed"),
        ("stopped", DomainState.RUNNING, "started"),
        ("running", DomainState.RUNNING, None),
        ("preparing", None, None),
        ("starting", DomainState.SHUT_OFF, None),
    ],
)
def test_a_lost_event_is_corrected_by_comparison(
    phase: VmPhase, state: DomainState | None, event: MachineEvent | None
) -> None:
    assert missed(phase, facts(state) if state else None) is event
