"""The states of a VM as users see them, and the transitions between them.

The diagram in docs/reference/states.md is drawn from TRANSITIONS. The agent's own state machine is
`virtbus.nodeagent.vm.machine`, and its phases map to these states.
"""

from enum import StrEnum


class VmState(StrEnum):
    """The states that `virtbus vm list` shows."""

    PENDING = "Pending"
    SCHEDULED = "Scheduled"
    PREPARING = "Preparing"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    DELETING = "Deleting"


class VmEvent(StrEnum):
    """The causes of a change of state."""

    SCHEDULE = "schedule"
    PREPARE = "prepare"
    START = "start"
    STARTED = "started"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOP = "stop"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAIL = "fail"
    LOST = "lost"
    FOUND = "found"
    DELETE = "delete"


S, E = VmState, VmEvent

TRANSITIONS: dict[tuple[VmState, VmEvent], VmState] = {
    (S.PENDING, E.SCHEDULE): S.SCHEDULED,
    (S.PENDING, E.FAIL): S.FAILED,
    (S.SCHEDULED, E.PREPARE): S.PREPARING,
    (S.SCHEDULED, E.STOPPED): S.STOPPED,
    (S.SCHEDULED, E.FAIL): S.FAILED,
    (S.PREPARING, E.START): S.STARTING,
    (S.PREPARING, E.STOPPED): S.STOPPED,
    (S.PREPARING, E.FAIL): S.FAILED,
    (S.STARTING, E.STARTED): S.RUNNING,
    (S.STARTING, E.PAUSED): S.PAUSED,
    (S.STARTING, E.PREPARE): S.PREPARING,
    (S.STARTING, E.STOP): S.STOPPING,
    (S.STARTING, E.STOPPED): S.STOPPED,
    (S.STARTING, E.FAIL): S.FAILED,
    (S.RUNNING, E.PAUSED): S.PAUSED,
    (S.RUNNING, E.STOP): S.STOPPING,
    (S.RUNNING, E.STOPPED): S.STOPPED,
    (S.RUNNING, E.SUCCEEDED): S.SUCCEEDED,
    (S.RUNNING, E.FAIL): S.FAILED,
    (S.PAUSED, E.RESUMED): S.RUNNING,
    (S.PAUSED, E.STOP): S.STOPPING,
    (S.PAUSED, E.STOPPED): S.STOPPED,
    (S.PAUSED, E.FAIL): S.FAILED,
    (S.STOPPING, E.STOPPED): S.STOPPED,
    (S.STOPPING, E.SUCCEEDED): S.SUCCEEDED,
    (S.STOPPING, E.FAIL): S.FAILED,
    (S.STOPPED, E.PREPARE): S.PREPARING,
    (S.SUCCEEDED, E.PREPARE): S.PREPARING,
    (S.FAILED, E.PREPARE): S.PREPARING,
    (S.FAILED, E.STOPPED): S.STOPPED,
    (S.UNKNOWN, E.FOUND): S.PREPARING,
    (S.UNKNOWN, E.STARTED): S.RUNNING,
    (S.UNKNOWN, E.PAUSED): S.PAUSED,
    (S.UNKNOWN, E.STOPPED): S.STOPPED,
    (S.UNKNOWN, E.FAIL): S.FAILED,
}
# In any state, a delete wins, and a silent node makes its reported state Unknown.
TRANSITIONS |= {(state, E.DELETE): S.DELETING for state in S}
TRANSITIONS |= {
    (state, E.LOST): S.UNKNOWN for state in S if state not in {S.PENDING, S.DELETING, S.UNKNOWN}
}

FINAL = frozenset({S.SUCCEEDED, S.FAILED, S.STOPPED})


def advance(state: VmState, event: VmEvent) -> VmState:
    """Return the state after `event`, or `state` itself if the table has no row."""
    return TRANSITIONS.get((state, event), state)
