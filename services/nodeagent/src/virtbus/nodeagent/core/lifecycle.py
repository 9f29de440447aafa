"""A VM on this node: one table, phase and event to phase and actions (design §4).

Everything that happens to a VM is an event here, and everything that the agent does about it an
action; docs/reference/states.md is drawn from TABLE, and the tests visit each row.
"""

from enum import StrEnum

from virtbus.schemas.states import VmState


class Phase(StrEnum):
    """Where a VM is, as its agent sees it."""

    NEW = "new"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    WAITING = "waiting"
    """Tried, could not for now (a service is away): tries again."""
    BACKING_OFF = "backing off"
    """Failed; tries again after a while."""
    FAILED = "failed"
    """Failed for good: only a change by the user helps."""
    ENDING = "ending"
    """To be deleted; the guest still runs or starts."""
    RELEASING = "releasing"
    RELEASED = "released"
    GONE = "gone"


class Event(StrEnum):
    """What happens to a VM."""

    # What is wanted, from the record.
    RUN = "run"
    HALT = "halt"
    RESTART = "restart"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    DELETE = "delete"
    PURGED = "purged"
    # What the node's services made.
    PARTS_READY = "parts ready"
    PARTS_FAILED = "parts failed"
    PARTS_IMPOSSIBLE = "parts impossible"
    RELEASED = "released"
    # What libvirt says.
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
    # Time.
    GRACE_OVER = "grace over"
    RETRY = "retry"
    STABLE = "stable"
    """The guest has run for a while: whatever ends it next is not what ended it before."""


class Action(StrEnum):
    """What the agent does."""

    PREPARE = "prepare"
    """Record on disk, seed, and what imaged and netd made; ends in PARTS_*."""
    SAVE = "save"
    """Record on disk, so that a lost bus can be made anew from the hosts."""
    START = "start"
    """Define and create; ends in STARTED or START_*."""
    AWAIT_START = "await start"
    """A start of an earlier agent is under way: wait for its end."""
    FOLLOW_PAUSE = "follow pause"
    """Let the guest's CPUs stand still or go on, as the record says; ends in PAUSED or RESUMED."""
    SHUTDOWN = "shutdown"
    """Ask the guest by ACPI, and set the grace timer."""
    DESTROY = "destroy"
    """End the guest; ends in ENDED."""
    RELEASE = "release"
    """Undefine, then netd and imaged let go, then our files and record; ends in RELEASED."""
    RETRY_SOON = "retry soon"
    RETRY_BACKED_OFF = "retry backed off"
    RESET_ATTEMPTS = "reset attempts"
    AWAIT_STABLE = "await stable"
    """Set the timer after which the back-off begins anew."""
    CONFIRM = "confirm"
    """A start is asked of a guest that is believed to run: see whether it does."""
    FORGET = "forget"
    """Purge the status."""


P, E, A = Phase, Event, Action

TABLE: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    # A record arrives, or the agent restarts and looks at what is there.
    (P.NEW, E.RUN): (P.PREPARING, (A.PREPARE,)),
    (P.NEW, E.HALT): (P.STOPPED, (A.SAVE,)),
    (P.NEW, E.STARTED): (P.RUNNING, ()),
    (P.NEW, E.PAUSED): (P.PAUSED, ()),
    (P.NEW, E.FOUND_STARTING): (P.STARTING, (A.AWAIT_START,)),
    (P.NEW, E.DELETE): (P.RELEASING, (A.RELEASE,)),
    # The way up.
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
    # The end.
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
    (P.ENDING, E.DELETE): (P.ENDING, (A.SHUTDOWN,)),  # asked again, with less grace
    (P.ENDING, E.GRACE_OVER): (P.ENDING, (A.DESTROY,)),
    (P.ENDING, E.SHUT_DOWN): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.ENDED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.CRASHED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_FAILED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_LATER): (P.RELEASING, (A.RELEASE,)),
    (P.RELEASING, E.RELEASED): (P.RELEASED, ()),
    (P.RELEASED, E.PURGED): (P.GONE, (A.FORGET,)),
}

# What follows when a guest ends by itself depends on its run strategy.
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
"""What would start or end a guest: it waits for as long as the VM is held."""
ASKED_AGAIN = frozenset({E.RESTART, E.PAUSE, E.UNPAUSE})
"""The record asks for it for as long as it is not so: while the VM is held it is let be."""
UP = frozenset({P.RUNNING, P.PAUSED})
WAY_DOWN = frozenset({P.STOPPING, P.ENDING})
GOING = frozenset({P.ENDING, P.RELEASING, P.RELEASED, P.GONE})
"""A delete that was accepted goes on, whatever the bus is now."""
START_LATER = frozenset({P.STOPPING, P.RUNNING, P.PAUSED})
"""A start that comes here is acted on once the guest rests, or is seen to run."""

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
    """What follows: the next phase and the actions, in order; the same phase where nothing does."""
    if phase in ALIVE and (row := BY_STRATEGY.get((strategy, event))) is not None:
        return row
    return TABLE.get((phase, event), (phase, ()))


STABLE_S = 60.0
"""As long as the longest back-off: a guest that crashes at each start is not tried ever faster."""


def backoff_s(attempt: int) -> float:
    """Seconds before try number `attempt` (1: the first retry): 1, 2, 4 … 60."""
    return min(60.0, 2.0 ** max(attempt - 1, 0))
