"""Defines the state machine of a VM on this node, as two orthogonal tables (ADR 0038).

In TABLE, an event leads from a phase of the VM to the next one, with actions. In CONTROL, a signal
changes the rights of the agent on the VM, with effects. docs/reference/states.md is generated from
both, and the tests visit each row.
"""

from typing import Literal, get_args

VmPhase = Literal[
    "new",
    "preparing",
    "starting",
    "running",
    "paused",
    "stopping",
    "stopped",
    "succeeded",
    "waiting",  # the next start follows after a delay
    "backing off",  # the start failed; the next one follows after a delay
    "failed",  # failed permanently: only a request or change by the user helps
    "ending",  # the VM is being deleted, but the guest still runs or starts
    "releasing",
    "released",
    "gone",
]
"""The phase of a VM, as its agent sees it."""

MachineEvent = Literal[
    # Desired state, from the record.
    "run",
    "halt",
    "restart",
    "pause",
    "unpause",
    "update",  # the running guest must be changed, or its start prepared again
    "delete",
    "purged",
    # Results of the node's services.
    "dependencies ready",
    "dependencies failed",
    "dependencies impossible",
    "released",
    # Reports of libvirt.
    "started",
    "start failed",
    "start later",
    "paused",
    "resumed",
    "shut down",  # the guest powered itself off
    "ended",  # the guest was destroyed, by the agent or from outside
    "crashed",
    "found starting",  # at the agent's start, libvirt still starts the guest
    # Timers.
    "grace expired",
    "retry",
    "stable",  # the guest has run for a while, which resets the backoff
]
"""An input of the first table."""

Action = Literal[
    "prepare",  # record on disk, seed, disks and network; ends in a "dependencies" event
    "save",  # record on disk, so that a lost bus can be rebuilt from the hosts
    "start",  # define and create; ends in "started", "paused" or a "start" event
    "await start",  # wait for the end of a start that an earlier agent began
    "sync pause",  # pause or resume the guest's CPUs as the record says
    "sync disks",  # attach, detach and grow the guest's volumes as the record says
    "sync limits",  # set the limits of the guest's disks as the record says
    "sync resources",  # set the guest's limits on the host as the record says
    "sync drives",  # eject and insert media as the record says
    "sync nics",  # plug and unplug NICs as the record says
    "shutdown",  # ask the guest by ACPI, and set the grace timer
    "destroy",  # end the guest; ends in "ended"
    "release",  # undefine, release network and disks, remove our files and record
    "retry soon",
    "retry backed off",
    "reset attempts",
    "await stable",  # set the timer after which the backoff is reset
    "verify running",  # after a start request for a guest that is up: read its domain
    "purge status",
    "watch",  # wait until the running guest is ready
    "unwatch",  # stop the tasks of a guest that is not up any more
    "stop ending",  # the guest has ended: do not repeat "destroy"
    "defer purge",  # keep the event until the VM is released
    "replay",  # take the deferred events again
    "report",  # write the status
    "settle",  # apply the requests that came meanwhile
]
"""A reaction of the first table."""

PHASES: tuple[VmPhase, ...] = get_args(VmPhase)
Row = tuple[VmPhase, tuple[Action, ...]]

TABLE: dict[tuple[VmPhase, MachineEvent], Row] = {
    # A record arrives, or the agent restarts and inspects the host.
    ("new", "run"): ("preparing", ("prepare",)),
    ("new", "halt"): ("stopped", ("save",)),
    ("new", "started"): ("running", ()),
    ("new", "paused"): ("paused", ()),
    ("new", "found starting"): ("starting", ("await start",)),
    ("new", "delete"): ("releasing", ("release",)),
    # Start.
    ("preparing", "dependencies ready"): ("starting", ("start",)),
    ("preparing", "dependencies failed"): ("backing off", ("retry backed off",)),
    ("preparing", "dependencies impossible"): ("failed", ()),
    ("preparing", "update"): ("preparing", ("prepare",)),
    ("preparing", "halt"): ("stopping", ("destroy",)),  # an earlier start may not be over
    ("starting", "started"): ("running", ("await stable",)),
    ("starting", "paused"): ("paused", ()),
    ("running", "stable"): ("running", ("reset attempts",)),
    ("starting", "start failed"): ("backing off", ("retry backed off",)),
    ("starting", "start later"): ("waiting", ("retry soon",)),
    ("starting", "crashed"): ("backing off", ("retry backed off",)),
    ("starting", "halt"): ("stopping", ("destroy",)),
    ("waiting", "retry"): ("preparing", ("prepare",)),
    ("waiting", "run"): ("preparing", ("prepare",)),
    ("waiting", "halt"): ("stopping", ("destroy",)),
    ("backing off", "retry"): ("preparing", ("prepare",)),
    ("backing off", "run"): ("preparing", ("reset attempts", "prepare")),
    ("backing off", "halt"): ("stopping", ("destroy",)),
    ("failed", "run"): ("preparing", ("reset attempts", "prepare")),
    ("failed", "halt"): ("stopped", ()),
    # The guest runs.
    ("running", "paused"): ("paused", ()),
    ("running", "run"): ("running", ("verify running",)),
    ("paused", "run"): ("paused", ("verify running",)),
    ("running", "pause"): ("running", ("sync pause",)),
    ("paused", "unpause"): ("paused", ("sync pause",)),
    **{
        (phase, "update"): (
            phase,
            ("sync disks", "sync limits", "sync resources", "sync drives", "sync nics"),
        )
        for phase in ("running", "paused")
    },
    ("paused", "resumed"): ("running", ("await stable",)),
    ("paused", "started"): ("running", ()),
    ("running", "restart"): ("stopping", ("shutdown",)),
    ("paused", "restart"): ("stopping", ("destroy",)),
    ("paused", "halt"): ("stopping", ("destroy",)),
    ("running", "halt"): ("stopping", ("shutdown",)),
    ("stopping", "grace expired"): ("stopping", ("destroy",)),
    ("stopping", "shut down"): ("stopped", ()),
    ("stopping", "ended"): ("stopped", ()),
    ("stopping", "crashed"): ("stopped", ()),
    ("stopped", "run"): ("preparing", ("reset attempts", "prepare")),
    ("stopped", "started"): ("running", ()),
    ("succeeded", "run"): ("preparing", ("reset attempts", "prepare")),
    ("succeeded", "halt"): ("stopped", ()),
    ("succeeded", "started"): ("running", ()),
    ("failed", "started"): ("running", ()),
    ("backing off", "started"): ("running", ()),
    ("waiting", "started"): ("running", ()),
    # End.
    ("preparing", "delete"): ("releasing", ("release",)),
    ("waiting", "delete"): ("releasing", ("release",)),
    ("backing off", "delete"): ("releasing", ("release",)),
    ("failed", "delete"): ("releasing", ("release",)),
    ("stopped", "delete"): ("releasing", ("release",)),
    ("succeeded", "delete"): ("releasing", ("release",)),
    ("starting", "delete"): ("ending", ("destroy",)),
    ("running", "delete"): ("ending", ("shutdown",)),
    ("paused", "delete"): ("ending", ("destroy",)),
    ("stopping", "delete"): ("ending", ("shutdown",)),
    ("ending", "delete"): ("ending", ("shutdown",)),  # requested again, with less grace
    ("ending", "grace expired"): ("ending", ("destroy",)),
    ("ending", "shut down"): ("releasing", ("release",)),
    ("ending", "ended"): ("releasing", ("release",)),
    ("ending", "crashed"): ("releasing", ("release",)),
    ("ending", "start failed"): ("releasing", ("release",)),
    ("ending", "start later"): ("releasing", ("release",)),
    ("releasing", "released"): ("released", ()),
    ("released", "purged"): ("gone", ("purge status",)),
}

# The reaction to a guest that ends by itself depends on its run strategy.
RESTART: Row = ("waiting", ("retry backed off",))
OVER: Row = ("succeeded", ())
BROKEN: Row = ("failed", ())
BY_STRATEGY: dict[tuple[str, MachineEvent], Row] = {
    ("Always", "shut down"): RESTART,
    ("Always", "ended"): RESTART,
    ("Always", "crashed"): RESTART,
    ("RerunOnFailure", "shut down"): OVER,
    ("RerunOnFailure", "ended"): RESTART,
    ("RerunOnFailure", "crashed"): RESTART,
    ("Once", "shut down"): OVER,
    ("Once", "ended"): BROKEN,
    ("Once", "crashed"): BROKEN,
    ("Manual", "shut down"): OVER,
    ("Manual", "ended"): OVER,
    ("Manual", "crashed"): BROKEN,
    ("Halted", "shut down"): OVER,
    ("Halted", "ended"): OVER,
    ("Halted", "crashed"): BROKEN,
}
ALIVE = frozenset[VmPhase]({"running", "paused", "new"})
ENDINGS = frozenset[MachineEvent]({"shut down", "ended", "crashed"})
UP = frozenset[VmPhase]({"running", "paused"})
WAY_DOWN = frozenset[VmPhase]({"stopping", "ending"})
EVACUATING = frozenset[VmPhase]({"releasing", "released", "gone"})
"""Phases in which no file of the VM may be created again."""
SETTLED = frozenset[VmPhase]({"stopped", "succeeded", "failed", *UP})
"""Stable phases, in which the VM must match its record."""
START_LATER = frozenset[VmPhase]({"stopping", "running", "paused"})
"""Phases in which a start waits until the guest has stopped or is confirmed running."""
REQUESTS = frozenset[MachineEvent](
    {"run", "halt", "restart", "pause", "unpause", "update", "delete"}
)
"""Events that a record requests."""

ENTRY: dict[VmPhase, tuple[Action, ...]] = {"running": ("watch",)}
EXIT: dict[tuple[VmPhase, VmPhase], tuple[Action, ...]] = {
    (before, after): ("unwatch",) for before in UP for after in set(PHASES) - UP
}
ALSO: dict[tuple[VmPhase, MachineEvent], tuple[Action, ...]] = {
    **{(phase, event): ("stop ending",) for phase in PHASES for event in ENDINGS},
    **{(phase, "purged"): ("defer purge",) for phase in set(PHASES) - {"released"}},
}
"""Actions of an event in addition to the actions of its row. ALSO alone causes no report."""
AT_REST: dict[VmPhase, tuple[Action, ...]] = {
    **dict.fromkeys(SETTLED, ("settle",)),
    "released": ("replay",),
}
"""The actions after a phase was entered and reported."""


Guard = Literal[
    "no start is in flight",  # during a start, the task that stops the guest posts its end
    "the record asks for a guest",
    "never",  # the event is a late result of an earlier step
]
"""A condition on an event, checked when it is posted."""
GUARDS: dict[tuple[VmPhase, MachineEvent], Guard] = {
    **{(phase, event): "no start is in flight" for phase in WAY_DOWN for event in ENDINGS},
    **{(phase, "dependencies ready"): "never" for phase in PHASES},
    ("preparing", "dependencies ready"): "the record asks for a guest",
}
UNEXPLAINED = {
    (phase, event)
    for phase in set(PHASES) - {"starting"}
    for event in ("start failed", "start later")
}
"""Results of a start that the agent itself ended. Their error is no failure of the VM."""


Control = Literal[
    "following",  # the agent applies the record
    "recalling",  # the agent first reads from the last status which requests are applied
    "held",  # the agent starts and ends nothing; observation and status continue
    "recalling, held",
    "recalling, terminated",
    "refused",  # the agent rejects the VM, and releases its disks and network
    "refused, held",
    "terminated",  # the agent ends the VM, which has no record
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
    "apply or report",  # as "apply"; if there are no such requests, write the status
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
HELD_BACK = frozenset[MachineEvent](
    {"run", "halt", "delete", "purged", "retry", "dependencies ready"}
)
"""Events that would start or end a guest: they are deferred while the VM is on hold."""
DROPPED = frozenset[MachineEvent]({"restart", "pause", "unpause"})
"""Events that are dropped while the VM is on hold. They are level-triggered: the actor posts them
again until they take effect."""
NOT_HELD = frozenset[VmPhase]({"ending", *EVACUATING})
"""Phases in which a hold has no effect: an accepted delete continues, even on another bus."""


def step(phase: VmPhase, event: MachineEvent, strategy: str) -> tuple[VmPhase, tuple[Action, ...]]:
    """Return the next phase and the actions of the row; the same phase if there is no row."""
    if phase in ALIVE and (row := BY_STRATEGY.get((strategy, event))) is not None:
        return row
    return TABLE.get((phase, event), (phase, ()))


def react(phase: VmPhase, event: MachineEvent, strategy: str) -> tuple[VmPhase, tuple[Action, ...]]:
    """Return the next phase and all actions of a step, in order.

    The order is: the actions of EXIT, ENTRY, ALSO and the row, "report", the actions of AT_REST.
    """
    after, actions = step(phase, event, strategy)
    entered = after if after != phase else None
    return after, (
        *EXIT.get((phase, after), ()),
        *(ENTRY.get(after, ()) if entered else ()),
        *ALSO.get((phase, event), ()),
        *actions,
        *(("report",) if entered or actions else ()),
        *(AT_REST.get(after, ()) if entered else ()),
    )


def accepts(phase: VmPhase, event: MachineEvent, *, starting: bool, powered: bool) -> bool:
    """Return True if the event may be posted in the phase."""
    match GUARDS.get((phase, event)):
        case "no start is in flight":
            return not starting
        case "the record asks for a guest":
            return powered
        case guard:
            return guard is None


def control(state: Control, signal: Signal, phase: VmPhase) -> tuple[Control, tuple[Effect, ...]]:
    """Return the next state in CONTROL and the effects, in order; `state` if there is no row."""
    if signal == "hold" and phase in NOT_HELD:
        return state, ()
    return CONTROL.get((state, signal), (state, ()))
