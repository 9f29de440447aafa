"""The state machine of a VM on this node, as two orthogonal tables (ADR 0038).

TABLE says what a VM does: everything that happens to it is an event, and all reactions of the agent
are actions. CONTROL says what the agent may do with it. docs/reference/states.md is generated from
both, and the tests visit each row.
"""

from enum import StrEnum
from typing import Literal


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
    DEPENDENCIES_READY = "dependencies ready"
    DEPENDENCIES_FAILED = "dependencies failed"
    DEPENDENCIES_IMPOSSIBLE = "dependencies impossible"
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
    GRACE_EXPIRED = "grace expired"
    RETRY = "retry"
    STABLE = "stable"
    """The guest has run for a while: its next end resets the back-off."""


class Action(StrEnum):
    """An effect of the agent."""

    PREPARE = "prepare"
    """Record on disk, seed, disks and network; ends in DEPENDENCIES_*."""
    SAVE = "save"
    """Record on disk, so that a lost bus can be rebuilt from the hosts."""
    START = "start"
    """Define and create; ends in STARTED or START_*."""
    AWAIT_START = "await start"
    """Wait for the end of a start that an earlier agent began."""
    SYNC_PAUSE = "sync pause"
    """Pause or resume the guest's CPUs as the record says; ends in PAUSED or RESUMED."""
    SHUTDOWN = "shutdown"
    """Ask the guest by ACPI, and set the grace timer."""
    DESTROY = "destroy"
    """End the guest; ends in ENDED."""
    RELEASE = "release"
    """Undefine, release network and disks, remove our files and record; ends in RELEASED."""
    RETRY_SOON = "retry soon"
    RETRY_BACKED_OFF = "retry backed off"
    RESET_ATTEMPTS = "reset attempts"
    AWAIT_STABLE = "await stable"
    """Set the timer after which the back-off is reset."""
    VERIFY_RUNNING = "verify running"
    """A start is requested for a guest that should be running: check that it is."""
    PURGE_STATUS = "purge status"
    # Actions of a phase's entry and exit, or of a kind of event.
    WATCH = "watch"
    """Wait until the running guest is ready."""
    UNWATCH = "unwatch"
    """Stop the tasks of a guest that is not up any more."""
    STOP_ENDING = "stop ending"
    """The guest has ended: nothing has to end it any more."""
    DEFER_PURGE = "defer purge"
    """Keep the event until the VM is released."""
    REPLAY = "replay"
    """Take the deferred events again."""
    REPORT = "report"
    """Write the status."""
    SETTLE = "settle"
    """Apply the requests that came meanwhile."""


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
    (P.PREPARING, E.DEPENDENCIES_READY): (P.STARTING, (A.START,)),
    (P.PREPARING, E.DEPENDENCIES_FAILED): (P.BACKING_OFF, (A.RETRY_BACKED_OFF,)),
    (P.PREPARING, E.DEPENDENCIES_IMPOSSIBLE): (P.FAILED, ()),
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
    (P.RUNNING, E.RUN): (P.RUNNING, (A.VERIFY_RUNNING,)),
    (P.PAUSED, E.RUN): (P.PAUSED, (A.VERIFY_RUNNING,)),
    (P.RUNNING, E.PAUSE): (P.RUNNING, (A.SYNC_PAUSE,)),
    (P.PAUSED, E.UNPAUSE): (P.PAUSED, (A.SYNC_PAUSE,)),
    (P.PAUSED, E.RESUMED): (P.RUNNING, (A.AWAIT_STABLE,)),
    (P.PAUSED, E.STARTED): (P.RUNNING, ()),
    (P.RUNNING, E.RESTART): (P.STOPPING, (A.SHUTDOWN,)),
    (P.PAUSED, E.RESTART): (P.STOPPING, (A.DESTROY,)),
    (P.PAUSED, E.HALT): (P.STOPPING, (A.DESTROY,)),
    (P.RUNNING, E.HALT): (P.STOPPING, (A.SHUTDOWN,)),
    (P.STOPPING, E.GRACE_EXPIRED): (P.STOPPING, (A.DESTROY,)),
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
    (P.ENDING, E.GRACE_EXPIRED): (P.ENDING, (A.DESTROY,)),
    (P.ENDING, E.SHUT_DOWN): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.ENDED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.CRASHED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_FAILED): (P.RELEASING, (A.RELEASE,)),
    (P.ENDING, E.START_LATER): (P.RELEASING, (A.RELEASE,)),
    (P.RELEASING, E.RELEASED): (P.RELEASED, ()),
    (P.RELEASED, E.PURGED): (P.GONE, (A.PURGE_STATUS,)),
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
UP = frozenset({P.RUNNING, P.PAUSED})
WAY_DOWN = frozenset({P.STOPPING, P.ENDING})
LEAVING = frozenset({P.RELEASING, P.RELEASED, P.GONE})
"""Phases in which no file of the VM may be created again."""
SETTLED = frozenset({P.STOPPED, P.SUCCEEDED, P.FAILED, *UP})
"""Stable phases, in which the VM must match its record."""
START_LATER = frozenset({P.STOPPING, P.RUNNING, P.PAUSED})
"""In these phases a start is deferred until the guest has stopped or is confirmed running."""
REQUESTS = frozenset({E.RUN, E.HALT, E.RESTART, E.PAUSE, E.UNPAUSE, E.DELETE})
"""Events that a record asks for."""

ENTRY: dict[Phase, tuple[Action, ...]] = {P.RUNNING: (A.WATCH,)}
EXIT = {(before, after): (A.UNWATCH,) for before in UP for after in set(Phase) - UP}
ALSO: dict[tuple[Phase, Event], tuple[Action, ...]] = {
    **{(phase, event): (A.STOP_ENDING,) for phase in Phase for event in ENDINGS},
    **{(phase, E.PURGED): (A.DEFER_PURGE,) for phase in set(Phase) - {P.RELEASED}},
}
"""Actions of an event besides its row; alone they are nothing to report."""
AT_REST: dict[Phase, tuple[Action, ...]] = {
    **dict.fromkeys(SETTLED, (A.SETTLE,)),
    P.RELEASED: (A.REPLAY,),
}
"""The actions after a phase was entered and reported."""


Guard = Literal[
    "no start is in flight",  # only the code that stops the guest reports its end during a start
    "the record asks for a guest",
    "never",  # the result is of an earlier step
]
"""A condition on an event, checked when it is posted."""
GUARDS: dict[tuple[Phase, Event], Guard] = {
    **{(phase, event): "no start is in flight" for phase in WAY_DOWN for event in ENDINGS},
    **{(phase, E.DEPENDENCIES_READY): "never" for phase in Phase},
    (P.PREPARING, E.DEPENDENCIES_READY): "the record asks for a guest",
}
UNEXPLAINED = {
    (phase, event)
    for phase in set(Phase) - {P.STARTING}
    for event in (E.START_FAILED, E.START_LATER)
}
"""A start that the agent ended: its error is not the VM's failure."""


Control = Literal[
    "following",  # the agent applies the record
    "recalling",  # it reads the last status first, which decides if the record asks for anything
    "held",  # it starts and ends nothing; observation and status continue
    "recalling, held",
    "recalling, terminated",
    "refused",  # it rejects the VM and releases what others made for it
    "refused, held",
    "terminated",  # it ends the VM, which has no record
]
"""The rights of the agent on a VM: the state of the second table."""

Signal = Literal[
    "recall",
    "recalled",
    "hold",
    "resume",
    "record",  # a new version of the record
    "settled",  # the VM came to a stable phase
    "refuse",
    "terminate",
]
"""An input of the second table."""

Effect = Literal[
    "apply",  # post the requests of the record that are not applied yet
    "apply or report",  # post them; if there are none, write the status
    "report",
    "save",
    "replay",  # take the deferred events again
    "discard",  # drop the deferred events
    "delete",
    "purge",
]
"""A reaction of the second table."""

END: tuple[Effect, ...] = ("discard", "delete", "purge")

CONTROL: dict[tuple[Control, Signal], tuple[Control, tuple[Effect, ...]]] = {
    ("following", "recall"): ("recalling", ()),
    ("following", "recalled"): ("following", ("apply",)),
    ("following", "hold"): ("held", ("report",)),
    ("following", "record"): ("following", ("save", "apply or report")),
    ("following", "settled"): ("following", ("apply",)),
    ("following", "refuse"): ("refused", ("delete",)),
    ("following", "terminate"): ("terminated", END),
    ("recalling", "recalled"): ("following", ("apply",)),
    ("recalling", "hold"): ("recalling, held", ("report",)),
    ("recalling", "record"): ("recalling", ("save", "report")),
    ("recalling", "terminate"): ("recalling, terminated", END),
    ("held", "recall"): ("recalling, held", ()),
    ("held", "hold"): ("held", ("report",)),
    ("held", "resume"): ("following", ("replay", "apply", "report")),
    ("held", "record"): ("held", ("report",)),
    ("held", "refuse"): ("refused, held", ("delete",)),
    ("held", "terminate"): ("terminated", END),
    ("recalling, held", "recalled"): ("held", ()),
    ("recalling, held", "hold"): ("recalling, held", ("report",)),
    ("recalling, held", "resume"): ("recalling", ("replay", "report")),
    ("recalling, held", "record"): ("recalling, held", ("report",)),
    ("recalling, held", "terminate"): ("recalling, terminated", END),
    ("refused", "hold"): ("refused, held", ("report",)),
    ("refused", "record"): ("refused", ("report",)),
    ("refused", "terminate"): ("refused", END),
    ("refused, held", "hold"): ("refused, held", ("report",)),
    ("refused, held", "resume"): ("refused", ("replay", "report")),
    ("refused, held", "record"): ("refused, held", ("report",)),
    ("refused, held", "terminate"): ("refused", END),
    ("recalling, terminated", "recalled"): ("terminated", ("apply",)),
    ("recalling, terminated", "record"): ("recalling, terminated", ("save", "report")),
    ("terminated", "recalled"): ("terminated", ("apply",)),
    ("terminated", "record"): ("terminated", ("save", "apply or report")),
    ("terminated", "settled"): ("terminated", ("apply",)),
}
RECALLS = frozenset[Control]({"recalling", "recalling, held", "recalling, terminated"})
ON_HOLD = frozenset[Control]({"held", "recalling, held", "refused, held"})
HELD_BACK = frozenset({E.RUN, E.HALT, E.DELETE, E.PURGED, E.RETRY, E.DEPENDENCIES_READY})
"""Events that would start or end a guest: they are deferred while the VM is on hold."""
DROPPED = frozenset({E.RESTART, E.PAUSE, E.UNPAUSE})
"""Level-triggered: these events are raised again until they take effect, so they are dropped rather
than deferred while the VM is on hold."""
NOT_HELD = frozenset({P.ENDING, *LEAVING})
"""An accepted delete continues, even on another bus."""


def step(phase: Phase, event: Event, strategy: str) -> tuple[Phase, tuple[Action, ...]]:
    """Return the next phase and the actions of the row; the same phase if the table has none."""
    if phase in ALIVE and (row := BY_STRATEGY.get((strategy, event))) is not None:
        return row
    return TABLE.get((phase, event), (phase, ()))


def react(phase: Phase, event: Event, strategy: str) -> tuple[Phase, tuple[Action, ...]]:
    """Return the next phase and all actions of a step, in order.

    These are the exit from the phase, the entry into the next, the event's own, the row's, the
    report, and those of a stable phase.
    """
    after, actions = step(phase, event, strategy)
    entered = after if after is not phase else None
    return after, (
        *EXIT.get((phase, after), ()),
        *(ENTRY.get(after, ()) if entered else ()),
        *ALSO.get((phase, event), ()),
        *actions,
        *((A.REPORT,) if entered or actions else ()),
        *(AT_REST.get(after, ()) if entered else ()),
    )


def accepts(phase: Phase, event: Event, *, starting: bool, powered: bool) -> bool:
    """Return True if the event may be posted in the phase."""
    match GUARDS.get((phase, event)):
        case "no start is in flight":
            return not starting
        case "the record asks for a guest":
            return powered
        case guard:
            return guard is None


def control(state: Control, signal: Signal, phase: Phase) -> tuple[Control, tuple[Effect, ...]]:
    """Return the next state of the second table and the effects, in order."""
    if signal == "hold" and phase in NOT_HELD:
        return state, ()
    return CONTROL.get((state, signal), (state, ()))
