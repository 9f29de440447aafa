"""Choice of a VM's next action by its run strategy, the state of its VMI and its requests.

The table follows KubeVirt's behaviour. Under Always, RerunOnFailure and Halted, a finished VMI is
deleted. The next reconcile then finds no VMI, and the table decides about a new VMI.
"""

from collections.abc import Mapping
from enum import StrEnum

from virtbus.kubebridge.core.vm.model import StateChange, Vm
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.schemas.vm import RunStrategy


class VmiPresence(StrEnum):
    """The state of a VM's VMI."""

    NONE = "none"
    ALIVE = "alive"
    ENDING = "ending"
    """The VMI is being deleted. The VM waits until the VMI is gone."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PendingRequest(StrEnum):
    """The first unmet request in `status.stateChangeRequests`."""

    NOTHING = "nothing"
    START = "start"
    STOP = "stop"


class Decision(StrEnum):
    """The action that a VM needs next."""

    NOTHING = "nothing"
    START = "create a VMI"
    START_ONCE = "create a VMI, unless this strategy has had one"
    STOP = "delete the VMI"
    RERUN = "ask for a start, then delete the VMI"
    RUN_ALWAYS = "change the strategy to Always"


R, H, A = RunStrategy, VmiPresence, PendingRequest
OVER = (H.SUCCEEDED, H.FAILED)
EXISTS = (H.ALIVE, *OVER)

TABLE: Mapping[tuple[RunStrategy, VmiPresence, PendingRequest], Decision] = {
    **{(R.ALWAYS, H.NONE, asked): Decision.START for asked in A},
    **{(R.ALWAYS, has, asked): Decision.STOP for has in OVER for asked in A},
    (R.ALWAYS, H.ALIVE, A.STOP): Decision.STOP,
    (R.RERUN_ON_FAILURE, H.NONE, A.NOTHING): Decision.START_ONCE,
    (R.RERUN_ON_FAILURE, H.NONE, A.START): Decision.START,
    **{(R.RERUN_ON_FAILURE, has, A.STOP): Decision.STOP for has in EXISTS},
    (R.RERUN_ON_FAILURE, H.SUCCEEDED, A.NOTHING): Decision.STOP,
    (R.RERUN_ON_FAILURE, H.SUCCEEDED, A.START): Decision.STOP,
    (R.RERUN_ON_FAILURE, H.FAILED, A.NOTHING): Decision.RERUN,
    (R.RERUN_ON_FAILURE, H.FAILED, A.START): Decision.STOP,
    (R.MANUAL, H.NONE, A.START): Decision.START,
    **{(R.MANUAL, has, A.STOP): Decision.STOP for has in EXISTS},
    (R.HALTED, H.NONE, A.START): Decision.RUN_ALWAYS,
    **{(R.HALTED, has, asked): Decision.STOP for has in EXISTS for asked in A},
    **{(R.ONCE, H.NONE, asked): Decision.START for asked in A},
}
"""The action for each combination. A combination without a row needs no action."""

BACKS_OFF = frozenset({R.ALWAYS, R.RERUN_ON_FAILURE, R.ONCE})
BACK_OFF_STEP_S, BACK_OFF_MAX_S = 10, 300


def has_of(vmi: Vmi | None) -> VmiPresence:
    """Return the state of a VM's VMI."""
    if vmi is None:
        return VmiPresence.NONE
    if vmi.deleting:
        return VmiPresence.ENDING
    if vmi.phase in FINAL:
        return VmiPresence.SUCCEEDED if vmi.phase is VmiPhase.SUCCEEDED else VmiPresence.FAILED
    return VmiPresence.ALIVE


def plan(vm: Vm, vmi: Vmi | None) -> tuple[Decision, list[StateChange]]:
    """Return the next action, and the requests that are still open.

    A change to Halted drops all earlier requests. Otherwise the start of an open restart would set
    the strategy back to Always.
    """
    halted = vm.strategy is RunStrategy.HALTED and vm.followed != vm.strategy
    has, requests = has_of(vmi), [] if halted else open_requests(vm, vmi)
    first = requests[0].action if requests else ""
    asked = {"Start": PendingRequest.START, "Stop": PendingRequest.STOP}.get(
        first, PendingRequest.NOTHING
    )
    do = TABLE.get((vm.strategy, has, asked), Decision.NOTHING)
    if do is Decision.START_ONCE:
        do = Decision.START if vm.followed != vm.strategy else Decision.NOTHING
    return do, requests


def open_requests(vm: Vm, vmi: Vmi | None) -> list[StateChange]:
    """Return the first unmet request and all requests after it."""
    requests = list(vm.requests)
    while requests and _met(requests[0], vmi):
        del requests[0]
    return requests


def _met(request: StateChange, vmi: Vmi | None) -> bool:
    """Return True if a request is met.

    A stop is met once its VMI is gone. A start is met once the VM has a live VMI. An unknown action
    counts as met.
    """
    match request.action:
        case "Stop":
            return vmi is None or request.uid != vmi.uid
        case "Start":
            return has_of(vmi) is VmiPresence.ALIVE
        case _:
            return True


def back_off_s(count: int, uid: str) -> int:
    """Return the seconds before the next start after `count` failures in a row: 10, 40, 90 … 300.

    The uid of the failed VMI adds up to 50 %, within the 300 s. VMs that fail together therefore
    start at different times, until their delays reach 300 s.
    """
    delay = BACK_OFF_STEP_S * max(count, 1) ** 2
    end = uid.replace("-", "")[-4:]
    apart = int(end or "0", 16) if set(end) <= set("0123456789abcdef") else 0
    return min(delay + apart % (delay // 2 + 1), BACK_OFF_MAX_S)
