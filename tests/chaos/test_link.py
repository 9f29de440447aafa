"""A broken link between a node and its bus: cut, half-open, slow and corrupting (F20, F22)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.chaos.field import Field
from tests.chaos.link import State
from tests.e2e.platform import Json, until

from virtbus.bus.runtime.ids import uuid7

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(180)]

REJOIN_S = 30.0
"""F20 says 10 s; a half-open connection is noticed by two pings of 10 s."""


@pytest.fixture(scope="module")
def _field() -> Iterator[Field]:
    held = Field()
    try:
        held.start()
        held.quiet = held.census()
        yield held
        held.stop()
    finally:
        held.wipe()


@pytest.fixture
def field(_field: Field) -> Iterator[Field]:
    """The shared platform, whole before and after, and without VMs."""
    yield _field
    _field.link.become(State.WELL)
    _field.wait_whole()
    _field.nothing_left()


@contextmanager
def wire(field: Field, state: State, at_least_s: float = 0.0) -> Iterator[None]:
    """Break the link until the context ends, for at least `at_least_s`."""
    begun = time.monotonic()
    field.link.become(state)
    try:
        yield
        time.sleep(max(0.0, begun + at_least_s - time.monotonic()))
    finally:
        field.link.become(State.WELL)


def _accept(field: Field, name: str) -> str:
    """Have a VM accepted in any state of its node; return its uid."""
    uid = uuid7()
    field.uids.add(uid)
    data: Json = {"uid": uid, "name": name, "image": "tiny", "memory": "64MiB"}
    assert field.ask("vm.create", data)["vm"]["uid"] == uid
    return uid


@pytest.mark.parametrize("state", [State.CUT, State.HALF_OPEN])
def test_a_node_behind_a_broken_link_rejoins_and_applies_changes_accepted_meanwhile(
    field: Field, state: State
) -> None:
    before = field.create("before")
    pids = field.pids()
    with wire(field, state, at_least_s=10):
        _accept(field, "meanwhile")
        field.ask("vm.delete", {"name": "before", "grace_s": 0})
        time.sleep(2)
        shown = {vm["name"]: vm["state"] for vm in field.vms()}
        assert shown["meanwhile"] == "Scheduled"
        assert shown["before"] in {"Deleting", "Unknown"}
    field.wait_state("meanwhile", "Running", within_s=REJOIN_S)
    until(
        lambda: before["uid"] not in {vm["uid"] for vm in field.vms()},
        "what was deleted meanwhile is gone",
        within_s=REJOIN_S,
    )
    assert field.pids() == pids, "no service ended"


@pytest.mark.parametrize("state", [State.SLOW, State.GARBLED])
def test_creates_and_deletes_end_over_a_bad_link(field: Field, state: State) -> None:
    pids = field.pids()
    uids = []
    with wire(field, state, at_least_s=5):
        uids += [_accept(field, f"vm-{number}") for number in range(3)]
        time.sleep(3)
        field.ask("vm.delete", {"name": "vm-0", "grace_s": 0})
    for number in (1, 2):
        view = field.wait_state(f"vm-{number}", "Running", within_s=2 * REJOIN_S)
        assert view["uid"] == uids[number]
    until(
        lambda: len(field.vms()) == 2, "what was deleted meanwhile is gone", within_s=2 * REJOIN_S
    )
    assert field.pids() == pids, "no service ended"
