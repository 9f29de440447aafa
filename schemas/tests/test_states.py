"""The table of user-visible states is complete, and the only source."""

from itertools import product

import pytest

from virtbus.schemas.states import FINAL, TRANSITIONS, VmEvent, VmState, advance

PAIRS = list(product(VmState, VmEvent))


@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
def test_each_row_decides_its_case(state: VmState, event: VmEvent) -> None:
    assert advance(state, event) is TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_an_event_without_a_row_changes_nothing(state: VmState, event: VmEvent) -> None:
    assert advance(state, event) is state


def reachable(start: VmState) -> set[VmState]:
    found, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        for event in VmEvent:
            if (following := advance(state, event)) not in found:
                found.add(following)
                waiting.append(following)
    return found


def test_every_state_is_reached_from_pending() -> None:
    assert reachable(VmState.PENDING) == set(VmState)


@pytest.mark.parametrize("state", VmState)
def test_a_delete_wins_in_every_state(state: VmState) -> None:
    assert advance(state, VmEvent.DELETE) is VmState.DELETING


def test_nothing_leaves_deleting() -> None:
    assert reachable(VmState.DELETING) == {VmState.DELETING}


def test_every_event_changes_something() -> None:
    assert {event for _, event in TRANSITIONS} == set(VmEvent)


def test_only_a_repeated_delete_keeps_its_phase() -> None:
    stays = [pair for pair, to in TRANSITIONS.items() if pair[0] is to]
    assert stays == [(VmState.DELETING, VmEvent.DELETE)]


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_stopped_vm_can_be_started_again(state: VmState) -> None:
    assert VmState.RUNNING in reachable(state)


@pytest.mark.parametrize("state", sorted(set(VmState) - {VmState.DELETING, VmState.PENDING}))
def test_a_silent_node_makes_its_vms_unknown_and_its_return_known(state: VmState) -> None:
    assert advance(state, VmEvent.LOST) is VmState.UNKNOWN
    assert VmState.RUNNING in reachable(VmState.UNKNOWN)
