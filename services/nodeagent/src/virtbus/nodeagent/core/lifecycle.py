"""The state machine of a VM on this node: phase and event to phase and actions.

Everything that happens to a VM is an event here, and all reactions of the agent are actions.
docs/reference/states.md is generated from TABLE, and the tests visit each row.
"""

from enum import StrEnum

from virtbus.schemas.states import VmState


class Phase(StrEnum):
    """The phase of a VM, as its agent sees it."""

    NEW = "new"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    WAITING = "waiting"
    """A dependency is unavailable: retries."""
    BACKING_OFF = "backing off"
    """Failed; retries after a delay."""
    FAILED = "failed"
    """Failed permanently: only a change by the user helps."""
    ENDING = "ending"
    """Being deleted; the guest still runs or starts."""
    RELEASING = "releasing"
    RELEASED = "released"
    GONE = "gone"


class Event(StrEnum):
    """An input of the state machine."""

    # Desired state, from the record.
    RUN = "run"
    HALT = "halt"
    RESTART = "restart"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    DELETE = "delete"
    PURGED = "purged"
    # Results of the node's services.
    PARTS_READY = "parts ready"
    PARTS_FAILED = "parts failed"
    PARTS_IMPOSSIBLE = "parts impossible"
    RELEASED = "released"
    # Reports of libvirt.
    STARTED = "started"
    START_FAILED = "start failed"
    START_LATER = "start later"
    PAUSED = "paused"
    RESUMED = "resumed"
    SHUT_DOWN = "shut down"
    """The guest powered itself off."""
    ENDED = "ended"
    """The guest was destroyed, by us or from outside."""
    CRASHED = "crashed"
    FOUND_STARTING = "found starting"
    # Timers.
    GRACE_OVER = "grace over"
    RETRY = "retry"
    STABLE = "stable"
    """The guest has run for a while: its next end resets the back-off."""


class Action(StrEnum):
    """An effect of the agent."""

    PREPARE = "prepare"
    """Record on disk, seed, disks and network; ends in PARTS_*."""
    SAVE = "save"
    """Record on disk, so that a lost bus can be rebuilt from the hosts."""
    START = "start"
    """Define and create; ends in STARTED or START_*."""
    AWAIT_START = "await start"
    """Wait for the end of a start that an earlier agent began."""
    FOLLOW_PAUSE = "follow pause"
    """Pause or resume the guest's CPUs as the record says; ends in PAUSED or RESUMED."""
    SHUTDOWN = "shutdown"
    """Ask the guest by ACPI, and set the grace timer."""
    DESTROY = "destroy"
    """End the guest; ends in ENDED."""
    RELEASE = "release"
    """Undefine, then release network and disks, then remove our files and record; ends in
    RELEASED."""
    RETRY_SOON = "retry soon"
    RETRY_BACKED_OFF = "retry backed off"
    RESET_ATTEMPTS = "reset attempts"
    AWAIT_STABLE = "await stable"
    """Set the timer after which the back-off is reset."""
    CONFIRM = "confirm"
    """A start is requested for a guest that should be running: check that it is."""
    FORGET = "forget"
    """Purge the status."""


P, E, A = Phase, Event, Action

TABLE: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    # A record arrives, or the agent restarts and inspects the host.
    (P.NEW, E.RUN): (P.PREPARING, (A.PREPARE,)),
    (P.NEW, E.HALT): (P.STOPPED, (A.SAVE,)),
    (P.NEW, E.STARTED): (P.RUNNING, ()),
    (P.NEW, E.PAUSED): (P.PAUSED, ()),
    (P.NEW, E.FOUND_STARTING): (P.STARTING, (A.AWAIT_START,)),
    (P.NEW, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    # Start.
    (P.PREPARING, E.PARTS_READY): (P.STARTING, (A.START,)),
    (P.PREPARING, E.PARTS_FAILED): (P.BACKING_OFF, (A.RETRY_BACKED_OFF,)),
    (P.PREPARING, E.PARTS_IMPOSSIBLE): (P.FAILED, ()),
    (P.PREPARING, E.HALT): (P.STOPPED, ()),
    (P.STARTING, E.STARTED): (P.RUNNING, (A.AWAIT_STABLE,)),
    (P.STARTING, E.PAUSED): (P.PAUSED, ()),
    (P.RUNNING, E.STABLE): (P.RUNNING, (A.RESET_ATTEMPTS,)),
    (P.STARTING, E.START_FAILED): (P.BACKING_OFF, (A.RETRY_BACKED_OFF,)),
    (P.STARTING, E.START_LATER): (P.WAITING, (A.RETRY_SOON,)),
    (P.STARTING, E.CRASHED): (P.BACKING_OFF, (A.RETRY_BACKED_OFF,)),
    (P.STARTING, E.HALT): (P.STOPPING, (A.DESTROY,)),
    (P.WAITING, E.RETRY): (P.PREPARING, (A.PREPARE,)),
    (P.WAITING, E.RUN): (P.PREPARING, (A.PREPARE,)),
    (P.WAITING, E.HALT): (P.STOPPED, ()),
    (P.BACKING_OFF, E.RETRY): (P.PREPARING, (A.PREPARE,)),
    (P.BACKING_OFF, E.RUN): (P.PREPARING, (A.RESET_ATTEMPTS, A.PREPARE)),
    (P.BACKING_OFF, E.HALT): (P.STOPPED, ()),
    (P.FAILED, E.RUN): (P.PREPARING, (A.RESET_ATTEMPTS, A.PREPARE)),
    (P.FAILED, E.HALT): (P.STOPPED, ()),
    # The guest runs.
    (P.RUNNING, E.PAUSED): (P.PAUSED, ()),
    (P.RUNNING, E.RUN): (P.RUNNING, (A.CONFIRM,)),
    (P.PAUSED, E.RUN): (P.PAUSED, (A.CONFIRM,)),
    (P.RUNNING, E.PAUSE): (P.RUNNING, (A.FOLLOW_PAUSE,)),
    (P.PAUSED, E.UNPAUSE): (P.PAUSED, (A.FOLLOW_PAUSE,)),
    (P.PAUSED, E.RESUMED): (P.RUNNING, (A.AWAIT_STABLE,)),
    (P.PAUSED, E.STARTED): (P.RUNNING, ()),
    (P.RUNNING, E.RESTART): (P.STOPPING, (A.SHUTDOWN,)),
    (P.PAUSED, E.RESTART): (P.STOPPING, (A.DESTROY,)),
    (P.PAUSED, E.HALT): (P.STOPPING, (A.DESTROY,)),
    (P.RUNNING, E.HALT): (P.STOPPING, (A.SHUTDOWN,)),
    (P.STOPPING, E.GRACE_OVER): (P.STOPPING, (A.DESTROY,)),
    (P.STOPPING, E.SHUT_DOWN): (P.STOPPED, ()),
    (P.STOPPING, E.ENDED): (P.STOPPED, ()),
    (P.STOPPING, E.CRASHED): (P.STOPPED, ()),
    (P.STOPPING, E.START_FAILED): (P.STOPPED, ()),
    (P.STOPPING, E.START_LATER): (P.STOPPED, ()),
    (P.STOPPED, E.RUN): (P.PREPARING, (A.RESET_ATTEMPTS, A.PREPARE)),
    (P.STOPPED, E.STARTED): (P.RUNNING, ()),
    (P.SUCCEEDED, E.RUN): (P.PREPARING, (A.RESET_ATTEMPTS, A.PREPARE)),
    (P.SUCCEEDED, E.HALT): (P.STOPPED, ()),
    (P.SUCCEEDED, E.STARTED): (P.RUNNING, ()),
    (P.FAILED, E.STARTED): (P.RUNNING, ()),
    (P.BACKING_OFF, E.STARTED): (P.RUNNING, ()),
    (P.WAITING, E.STARTED): (P.RUNNING, ()),
    # End.
    (P.PREPARING, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.WAITING, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.BACKING_OFF, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.FAILED, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.STOPPED, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.SUCCEEDED, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    (P.STARTING, E.DELETE): (P.ENDING, (A.DESTROY,)),
    (P.RUNNING, E.DELETE): (P.ENDING, (A.SHUTDOWN,)),
    (P.PAUSED, E.DELETE): (P.ENDING, (A.DESTROY,)),
    (P.STOPPING, E.DELETE): (P.ENDING, (A.SHUTDOWN,)),
    (P.ENDING, E.DELETE): (P.ENDING, (A.SHUTDOWN,)),  # requested again, with less grace
    (P.ENDING, E.GRACE_OVER): (P.ENDING, (A.DESTROY,)),
    (P.ENDING, E.SHUT_DOWN): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.ENDED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.CRASHED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_FAILED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_LATER): (P.RELEASING, (A.RELEASE,)),
    (P.RELEASING, E.RELEASED): (P.RELEASED, ()),
    (P.RELEASED, E.PURGED): (P.GONE, (A.FORGET,)),
}

# The reaction to a guest that ends by itself depends on its run strategy.
RESTART = (P.WAITING, (A.RETRY_BACKED_OFF,))
OVER = (P.SUCCEEDED, ())
BROKEN = (P.FAILED, ())
BY_STRATEGY: dict[tuple[str, Event], tuple[Phase, tuple[Action, ...]]] = {
    ("Always", E.SHUT_DOWN): RESTART,
    ("Always", E.ENDED): RESTART,
    ("Always", E.CRASHED): RESTART,
    ("RerunOnFailure", E.SHUT_DOWN): OVER,
    ("RerunOnFailure", E.ENDED): RESTART,
    ("RerunOnFailure", E.CRASHED): RESTART,
    ("Once", E.SHUT_DOWN): OVER,
    ("Once", E.ENDED): BROKEN,
    ("Once", E.CRASHED): BROKEN,
    ("Manual", E.SHUT_DOWN): OVER,
    ("Manual", E.ENDED): OVER,
    ("Manual", E.CRASHED): BROKEN,
    ("Halted", E.SHUT_DOWN): OVER,
    ("Halted", E.ENDED): OVER,
    ("Halted", E.CRASHED): BROKEN,
}
ALIVE = frozenset({P.RUNNING, P.PAUSED, P.NEW})
ENDINGS = frozenset({E.SHUT_DOWN, E.ENDED, E.CRASHED})
HELD_BACK = frozenset({E.RUN, E.HALT, E.DELETE, E.PURGED, E.RETRY, E.PARTS_READY})
"""Events that would start or end a guest: they wait while the VM is on hold."""
ASKED_FOR = frozenset({E.RUN, E.HALT, E.RESTART, E.PAUSE, E.UNPAUSE, E.DELETE})
"""Events that a record asks for."""
ASKED_AGAIN = frozenset({E.RESTART, E.PAUSE, E.UNPAUSE})
"""Level-triggered: these events are raised again until they take effect, so they are dropped rather
than queued while the VM is on hold."""
UP = frozenset({P.RUNNING, P.PAUSED})
WAY_DOWN = frozenset({P.STOPPING, P.ENDING})
GOING = frozenset({P.ENDING, P.RELEASING, P.RELEASED, P.GONE})
"""An accepted delete continues, even on another bus."""
START_LATER = frozenset({P.STOPPING, P.RUNNING, P.PAUSED})
"""In these phases a start is deferred until the guest has stopped or is confirmed running."""

VISIBLE: dict[Phase, VmState] = {
    P.NEW: VmState.SCHEDULED,
    P.PREPARING: VmState.PREPARING,
    P.STARTING: VmState.STARTING,
    P.RUNNING: VmState.RUNNING,
    P.PAUSED: VmState.PAUSED,
    P.STOPPING: VmState.STOPPING,
    P.STOPPED: VmState.STOPPED,
    P.SUCCEEDED: VmState.SUCCEEDED,
    P.WAITING: VmState.PREPARING,
    P.BACKING_OFF: VmState.FAILED,
    P.FAILED: VmState.FAILED,
    P.ENDING: VmState.DELETING,
    P.RELEASING: VmState.DELETING,
    P.RELEASED: VmState.DELETING,
    P.GONE: VmState.DELETING,
}


def step(phase: Phase, event: Event, strategy: str) -> tuple[Phase, tuple[Action, ...]]:
    """Return the next phase and the actions, in order; the same phase if the table has no row."""
    if phase in ALIVE and (row := BY_STRATEGY.get((strategy, event))) is not None:
        return row
    return TABLE.get((phase, event), (phase, ()))


STABLE_S = 60.0
"""As long as the longest delay, so that retries of a crashing guest never become faster."""


def backoff_s(attempt: int) -> float:
    """Return the delay before retry `attempt` (from 1): 1, 2, 4 … 60 s."""
    return min(60.0, 2.0 ** max(attempt - 1, 0))
