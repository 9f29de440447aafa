"""The state that users see follows from the record, the node's status, and the node."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, status

from virtbus.controller.core.nodes import UNCERTAIN
from virtbus.controller.core.vm_states import STATES, StateInputs, visible_state
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState

EVACUATING = {"evacuating": True, "epoch": 2}
CASES: list[tuple[dict[str, Any], dict[str, Any] | None, VmState]] = [
    ({"deleting": True}, None, VmState.DELETING),
    ({"deleting": True, "evacuating": True}, {"state": VmState.RUNNING}, VmState.DELETING),
    ({"node": UNPLACED}, None, VmState.PENDING),
    ({}, {"state": VmState.DELETING, "refused": True}, VmState.PENDING),
    (EVACUATING, {"state": VmState.DELETING, "released": True}, VmState.PENDING),
    (EVACUATING, {"state": VmState.DELETING}, VmState.STOPPING),
    (EVACUATING, {"state": VmState.RUNNING}, VmState.RUNNING),
    ({}, {"state": VmState.DELETING}, VmState.DELETING),
    ({}, None, VmState.SCHEDULED),
    ({"epoch": 2}, {"state": VmState.RUNNING, "epoch": 1}, VmState.SCHEDULED),
    ({}, {"state": VmState.PAUSED}, VmState.PAUSED),
]
SURE = {VmState.DELETING, VmState.PENDING}
"""States that hold even if the node is silent."""


@pytest.mark.parametrize(("wanted", "said", "state"), CASES)
def test_a_vm_has_the_state_of_the_first_row_that_holds(
    wanted: dict[str, Any], said: dict[str, Any] | None, state: VmState
) -> None:
    one = record(**wanted)
    reported = None if said is None else status(one, **said)
    assert visible_state(one, reported, NodeState.READY) is state
    for node in UNCERTAIN:
        seen = visible_state(one, reported, node)
        assert seen is (state if state in SURE else VmState.UNKNOWN)


def test_the_last_row_always_holds() -> None:
    assert [row for row in STATES if row.state is None] == [STATES[-1]]
    assert STATES[-1].holds(StateInputs(record(), NodeState.READY))
