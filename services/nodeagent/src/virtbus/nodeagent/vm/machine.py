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


Action = Literal[
    "prepare",  # record on disk, seed, disks and network; ends in DEPENDENCIES_*
    "save",  # record on disk, so that a lost bus can be rebuilt from the hosts
    "start",  # define and create; ends in STARTED or START_*
    "await start",  # wait for the end of a start that an earlier agent began
    "sync pause",  # pause or resume the guest's CPUs as the record says; ends in PAUSED or RESUMED
    "shutdown",  # ask the guest by ACPI, and set the grace timer
    "destroy",  # end the guest; ends in ENDED
    "release",  # undefine, release network and disks, remove our files and record; ends in RELEASED
    "retry soon",
    "retry backed off",
    "reset attempts",
    "await stable",  # set the timer after which the back-off is reset
    "verify running",  # a start is requested for a guest that should be running: check that it is
    "purge status",
    "watch",  # wait until the running guest is ready
    "unwatch",  # stop the tasks of a guest that is not up any more
    "stop ending",  # the guest has ended: nothing has to end it any more
    "defer purge",  # keep the event until the VM is released
    "replay",  # take the deferred events again
    "report",  # write the status
    "settle",  # apply the requests that came meanwhile
]
"""An effect of the agent."""

P, E = Phase, Event
Row = tuple[Phase, tuple[Action, ...]]

TABLE: dict[tuple[Phase, Event], Row] = {
    # A record arrives, or the agent restarts and inspects the host.
    (P.NEW, E.RUN): (P.PREPARING, ("prepare",)),
    (P.NEW, E.HALT): (P.STOPPED, ("save",)),
    (P.NEW, E.STARTED): (P.RUNNING, ()),
    (P.NEW, E.PAUSED): (P.PAUSED, ()),
    (P.NEW, E.FOUND_STARTING): (P.STARTING, ("await start",)),
    (P.NEW, E.DELETE): (P.RELEASING, ("release",)),
    # Start.
    (P.PREPARING, E.DEPENDENCIES_READY): (P.STARTING, ("start",)),
    (P.PREPARING, E.DEPENDENCIES_FAILED): (P.BACKING_OFF, ("retry backed off",)),
    (P.PREPARING, E.DEPENDENCIES_IMPOSSIBLE): (P.FAILED, ()),
    (P.PREPARING, E.HALT): (P.STOPPED, ()),
    (P.STARTING, E.STARTED): (P.RUNNING, ("await stable",)),
    (P.STARTING, E.PAUSED): (P.PAUSED, ()),
    (P.RUNNING, E.STABLE): (P.RUNNING, ("reset attempts",)),
    (P.STARTING, E.START_FAILED): (P.BACKING_OFF, ("retry backed off",)),
    (P.STARTING, E.START_LATER): (P.WAITING, ("retry soon",)),
    (P.STARTING, E.CRASHED): (P.BACKING_OFF, ("retry backed off",)),
    (P.STARTING, E.HALT): (P.STOPPING, ("destroy",)),
    (P.WAITING, E.RETRY): (P.PREPARING, ("prepare",)),
    (P.WAITING, E.RUN): (P.PREPARING, ("prepare",)),
    (P.WAITING, E.HALT): (P.STOPPED, ()),
    (P.BACKING_OFF, E.RETRY): (P.PREPARING, ("prepare",)),
    (P.BACKING_OFF, E.RUN): (P.PREPARING, ("reset attempts", "prepare")),
    (P.BACKING_OFF, E.HALT): (P.STOPPED, ()),
    (P.FAILED, E.RUN): (P.PREPARING, ("reset attempts", "prepare")),
    (P.FAILED, E.HALT): (P.STOPPED, ()),
    # The guest runs.
    (P.RUNNING, E.PAUSED): (P.PAUSED, ()),
    (P.RUNNING, E.RUN): (P.RUNNING, ("verify running",)),
    (P.PAUSED, E.RUN): (P.PAUSED, ("verify running",)),
    (P.RUNNING, E.PAUSE): (P.RUNNING, ("sync pause",)),
    (P.PAUSED, E.UNPAUSE): (P.PAUSED, ("sync pause",)),
    (P.PAUSED, E.RESUMED): (P.RUNNING, ("await stable",)),
    (P.PAUSED, E.STARTED): (P.RUNNING, ()),
    (P.RUNNING, E.RESTART): (P.STOPPING, ("shutdown",)),
    (P.PAUSED, E.RESTART): (P.STOPPING, ("destroy",)),
    (P.PAUSED, E.HALT): (P.STOPPING, ("destroy",)),
    (P.RUNNING, E.HALT): (P.STOPPING, ("shutdown",)),
    (P.STOPPING, E.GRACE_EXPIRED): (P.STOPPING, ("destroy",)),
    (P.STOPPING, E.SHUT_DOWN): (P.STOPPED, ()),
    (P.STOPPING, E.ENDED): (P.STOPPED, ()),
    (P.STOPPING, E.CRASHED): (P.STOPPED, ()),
    (P.STOPPING, E.START_FAILED): (P.STOPPED, ()),
    (P.STOPPING, E.START_LATER): (P.STOPPED, ()),
    (P.STOPPED, E.RUN): (P.PREPARING, ("reset attempts", "prepare")),
    (P.STOPPED, E.STARTED): (P.RUNNING, ()),
    (P.SUCCEEDED, E.RUN): (P.PREPARING, ("reset attempts", "prepare")),
    (P.SUCCEEDED, E.HALT): (P.STOPPED, ()),
    (P.SUCCEEDED, E.STARTED): (P.RUNNING, ()),
    (P.FAILED, E.STARTED): (P.RUNNING, ()),
    (P.BACKING_OFF, E.STARTED): (P.RUNNING, ()),
    (P.WAITING, E.STARTED): (P.RUNNING, ()),
    # End.
    (P.PREPARING, E.DELETE): (P.RELEASING, ("release",)),
    (P.WAITING, E.DELETE): (P.RELEASING, ("release",)),
    (P.BACKING_OFF, E.DELETE): (P.RELEASING, ("release",)),
    (P.FAILED, E.DELETE): (P.RELEASING, ("release",)),
    (P.STOPPED, E.DELETE): (P.RELEASING, ("release",)),
    (P.SUCCEEDED, E.DELETE): (P.RELEASING, ("release",)),
    (P.STARTING, E.DELETE): (P.ENDING, ("destroy",)),
    (P.RUNNING, E.DELETE): (P.ENDING, ("shutdown",)),
    (P.PAUSED, E.DELETE): (P.ENDING, ("destroy",)),
    (P.STOPPING, E.DELETE): (P.ENDING, ("shutdown",)),
    (P.ENDING, E.DELETE): (P.ENDING, ("shutdown",)),  # requested again, with less grace
    (P.ENDING, E.GRACE_EXPIRED): (P.ENDING, ("destroy",)),
    (P.ENDING, E.SHUT_DOWN): (P.RELEASING, ("release",)),
    (P.ENDING, E.ENDED): (P.RELEASING, ("release",)),
    (P.ENDING, E.CRASHED): (P.RELEASING, ("release",)),
    (P.ENDING, E.START_FAILED): (P.RELEASING, ("release",)),
    (P.ENDING, E.START_LATER): (P.RELEASING, ("release",)),
    (P.RELEASING, E.RELEASED): (P.RELEASED, ()),
    (P.RELEASED, E.PURGED): (P.GONE, ("purge status",)),
}

# The reaction to a guest that ends by itself depends on its run strategy.
RESTART: Row = (P.WAITING, ("retry backed off",))
OVER: Row = (P.SUCCEEDED, ())
BROKEN: Row = (P.FAILED, ())
BY_STRATEGY: dict[tuple[str, Event], Row] = {
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

ENTRY: dict[Phase, tuple[Action, ...]] = {P.RUNNING: ("watch",)}
EXIT: dict[tuple[Phase, Phase], tuple[Action, ...]] = {
    (before, after): ("unwatch",) for before in UP for after in set(Phase) - UP
}
ALSO: dict[tuple[Phase, Event], tuple[Action, ...]] = {
    **{(phase, event): ("stop ending",) for phase in Phase for event in ENDINGS},
    **{(phase, E.PURGED): ("defer purge",) for phase in set(Phase) - {P.RELEASED}},
}
"""Actions of an event besides its row; alone they are nothing to report."""
AT_REST: dict[Phase, tuple[Action, ...]] = {
    **dict.fromkeys(SETTLED, ("settle",)),
    P.RELEASED: ("replay",),
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
        *(("report",) if entered or actions else ()),
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
