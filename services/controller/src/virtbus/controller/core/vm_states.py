"""Decides the state of a VM that users see, from a table over its record, status and node.

docs/reference/states.md is generated from STATES.
"""

from collections.abc import Callable
from typing import NamedTuple

from virtbus.controller.core.nodes import UNCERTAIN
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus


class StateInputs(NamedTuple):
    """The inputs of the table.

    The last four fields come from the VM's status. If its epoch is lower than the record's, they
    keep their defaults.
    """

    record: VmRecord
    node: NodeState
    reported: VmState = VmState.SCHEDULED
    """The state in the node's last status; Scheduled before the first status."""
    releasing: bool = False
    """True if the node removes the VM from its host, or has removed it."""
    released: bool = False
    rejected: bool = False


class StateRow(NamedTuple):
    """A state, and its condition in words and as a function.

    A `state` of None stands for the state that the node reported.
    """

    state: VmState | None
    when: str
    holds: Callable[[StateInputs], bool]


STATES = (
    StateRow(VmState.DELETING, "a user deleted it", lambda vm: vm.record.deleting),
    StateRow(VmState.PENDING, "it has no node", lambda vm: vm.record.node == UNPLACED),
    StateRow(
        VmState.PENDING,
        "its node rejected it: it goes to another",
        lambda vm: vm.releasing and vm.rejected,
    ),
    StateRow(
        VmState.PENDING,
        "its node has released it for a move",
        lambda vm: vm.releasing and vm.record.evacuating and vm.released,
    ),
    StateRow(
        VmState.DELETING,
        "its node releases it, and not for a move",
        lambda vm: vm.releasing and not vm.record.evacuating,
    ),
    StateRow(
        VmState.UNKNOWN,
        f"the state of its node is one of {', '.join(sorted(UNCERTAIN))} (I9)",
        lambda vm: vm.node in UNCERTAIN,
    ),
    StateRow(VmState.STOPPING, "its node releases it for a move", lambda vm: vm.releasing),
    StateRow(None, "otherwise; Scheduled before its node reports", lambda _: True),
)
"""The first row whose condition holds decides."""


def visible_state(record: VmRecord, status: VmStatus | None, node: NodeState) -> VmState:
    """Return the state to show."""
    seen = StateInputs(record, node)
    if status is not None and status.epoch >= record.epoch:
        releasing = status.state is VmState.DELETING
        seen = StateInputs(record, node, status.state, releasing, status.released, status.refused)
    for row in STATES:
        if row.holds(seen):
            return row.state or seen.reported
    return seen.reported
