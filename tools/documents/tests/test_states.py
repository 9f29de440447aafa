"""The page of states shows tables that drive the code, and every state is in one."""

from virtbus.controller.core.vm_states import STATES
from virtbus.nodeagent.vm.status import VISIBLE
from virtbus.schemas.states import VmState


def test_every_state_is_reported_or_decided() -> None:
    assert {*VISIBLE.values(), *(row.state for row in STATES)} - {None} == set(VmState)
