"""Table of the phase of a VMI, from its previous phase and the state of its VM.

Final phases never change, because a VMI is one run of a guest.
"""

from collections.abc import Mapping

from virtbus.kubebridge.core.vmi.model import FINAL, VmiPhase
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView

S, P = VmState, VmiPhase

PHASE_OF: Mapping[VmState, VmiPhase | None] = {
    S.PENDING: P.PENDING,
    S.SCHEDULED: P.SCHEDULING,
    S.PREPARING: P.SCHEDULING,
    S.STARTING: P.SCHEDULED,
    S.RUNNING: P.RUNNING,
    S.PAUSED: P.RUNNING,
    S.STOPPING: None,
    S.STOPPED: P.SUCCEEDED,
    S.SUCCEEDED: P.SUCCEEDED,
    S.FAILED: P.FAILED,
    S.UNKNOWN: P.UNKNOWN,
    S.DELETING: None,
}
"""The phase for each state. None keeps the previous phase. FAILED is final only if the guest ran
before (`phase_of`)."""

RANK = {P.PENDING: 0, P.SCHEDULING: 1, P.SCHEDULED: 2, P.RUNNING: 3}


def phase_of(before: VmiPhase, view: VmView | None, *, gone: bool) -> VmiPhase:
    """Return the next phase. `gone` means that the VM certainly no longer exists."""
    if before in FINAL:
        return before
    if gone:
        return P.FAILED
    if view is None:
        return before
    after = PHASE_OF[view.state]
    if view.state is S.FAILED and view.failure_stage != "guest":
        after = P.SCHEDULING  # the guest never ran; the node or the bridge retries the start
    if after is None:
        return before
    if before in RANK and after in RANK and RANK[after] < RANK[before]:
        return before  # the view is stale, or the guest restarts after its node was down
    return after


EVENTS: Mapping[VmiPhase, tuple[str, str]] = {
    P.RUNNING: ("Started", "VirtualMachineInstance started."),
    P.SUCCEEDED: ("Stopped", "The VirtualMachineInstance was shut down."),
    P.FAILED: ("Stopped", "The VirtualMachineInstance crashed."),
}
"""The reason and the message of the Event at the start of a phase."""

ENDS: Mapping[str, str] = {
    "panicked": "The VirtualMachineInstance's guest panicked.",
    "watchdog": "The VirtualMachineInstance was powered off by its watchdog.",
    "ended": "The VirtualMachineInstance was ended by somebody on its node.",
}
"""Messages of the Event of FAILED, by `GuestExit.how`. Other values use the message in EVENTS."""
