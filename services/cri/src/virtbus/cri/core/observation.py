"""Derives the phases of a pod's containers from the state of its VM on the bus, by `MEANING`.

A view that is older than virtbus-cri's last change of the VM is ignored. If the bus was restored,
`read_again` accepts such a view. A container ends only if its VM is known to have ended, and a
missing view proves no end. While the VM's node is unreachable, no phase changes.
"""

from collections.abc import Mapping
from typing import Literal

from virtbus.cri.core import stages
from virtbus.cri.core.pod import Container, Ending, Machine, Pod
from virtbus.cri.core.pod_networks import NIC
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import NETWORK_READY, VmView

Word = Literal["unchanged", "runs", "ended"]

MEANING: Mapping[VmState, Word] = {
    VmState.PENDING: "unchanged",
    VmState.SCHEDULED: "unchanged",
    VmState.PREPARING: "unchanged",
    VmState.STARTING: "unchanged",
    VmState.RUNNING: "runs",
    VmState.PAUSED: "runs",
    VmState.STOPPING: "unchanged",
    VmState.STOPPED: "ended",
    VmState.SUCCEEDED: "ended",
    VmState.FAILED: "ended",
    VmState.UNKNOWN: "unchanged",
    VmState.DELETING: "unchanged",
}
"""By state of a VM: the meaning for the active container."""

KILLED = 137
"""The exit code of a container that was killed: 128 + SIGKILL."""
START_FAILED = 128
"""The exit code that containerd gives to a container whose start failed."""

EXITS: Mapping[str, tuple[int, str]] = {
    "shut down": (0, "Completed"),
    "ended": (KILLED, "Error"),
    "crashed": (134, "EmulatorDied"),
    "panicked": (1, "GuestPanicked"),
    "watchdog": (124, "WatchdogExpired"),
}
"""By the way in which a guest ended: the exit code and the reason of its container."""

WORDS: Mapping[str, str] = {
    "shut down": "the guest powered itself off",
    "ended": "the guest was ended from outside",
    "crashed": "the guest's emulator died, or its host restarted",
    "panicked": "the guest's kernel panicked",
    "watchdog": "the guest's watchdog powered it off",
}


def observed(pod: Pod, view: VmView, now_ns: int) -> Pod:
    """Return the pod with the changes that a view of its VM shows."""
    machine = pod.machine
    if machine is None or machine.uid != view.uid or view.revision < machine.revision:
        return pod
    pod = pod.with_machine(
        made=bool(view.spec.volumes),
        **_network(machine, view),
        state=str(view.state),
        message=view.message,
        reason=view.reason,
        stage=view.failure_stage,
        resources=view.resources,
        resources_wait=_resources_wait(view),
        observed_generation=view.observed_generation,
    )
    container = pod.active
    if container is None or not view.power_observed or _begins(view):
        return pod
    match MEANING[view.state]:
        case "unchanged":
            return pod
        case "runs":
            if container.phase == "running":
                return pod
            started_ns = view.started_ns or now_ns
            update = {"phase": "running", "started_ns": started_ns}
            return pod.with_container(container.model_copy(update=update))
        case "ended":
            return ended(pod, container, ending_of(container, view, now_ns), off=view.powered)


def doubtful(pod: Pod, view: VmView) -> bool:
    """Return True if the view is unexpectedly older than virtbus-cri's last change of the VM.

    Either a controller lags behind, or the bus was restored. While a container starts, older views
    are expected.
    """
    starts = pod.active is not None and pod.active.phase == "starting"
    return pod.machine is not None and view.revision < pod.machine.revision and not starts


def read_again(pod: Pod, view: VmView, now_ns: int) -> Pod:
    """Return the pod with the changes of `view`, just read from the leader of the stream of VMs.

    The leader has the latest view. If this view is older than virtbus-cri's last change, the bus
    was restored or rebuilt, and its revisions are lower than before.
    """
    machine = pod.machine
    if machine is not None and machine.uid == view.uid and doubtful(pod, view):
        generation = min(machine.network_generation, view.generation)
        pod = pod.with_machine(revision=view.revision, network_generation=generation)
    return observed(pod, view, now_ns)


def _network(machine: Machine, view: VmView) -> dict[str, object]:
    """Return the network fields of a machine that the view changes.

    If the node's status is older than virtbus-cri's last change of `network`, the result is empty.
    """
    if view.observed_generation < machine.network_generation:
        return {}
    addresses = tuple(
        address.partition("/")[0]
        for nic in view.interfaces
        for address in nic.addresses
        if nic.name == NIC
    )
    found: dict[str, object] = {"addresses": addresses} if addresses else {}
    for one in view.conditions:
        if one.type == NETWORK_READY and one.reason == machine.network:
            found |= {"network_reached": True, "network_error": ""}
        elif one.type == NETWORK_READY and one.message:
            why = stages.text("network", one.reason, one.message)
            found |= {"network_reached": False, "network_error": why}
    return found


def _resources_wait(view: VmView) -> str:
    waits = (one.message for one in view.conditions if one.type == "ResourcesPending")
    return next(waits, "")


def _begins(view: VmView) -> bool:
    """Return True if a start was requested, and the node has not reported about this start yet.

    Until the report, the record is powered on and the state is Stopped. After a guest's own end,
    the state is Succeeded or Failed.
    """
    return view.powered and view.state is VmState.STOPPED


def ending_of(container: Container, view: VmView, now_ns: int) -> Ending:
    """Return the end of a container whose VM is known to have ended."""
    if container.phase == "starting" and view.state is VmState.FAILED and view.started_ns is None:
        why = view.message or "no reason is known"
        message = stages.text(view.failure_stage, view.reason, f"the VM did not start: {why}")
        return Ending(
            finished_ns=now_ns, exit_code=START_FAILED, reason="StartError", message=message
        )
    return ending_by(container, view.last_exit, now_ns)


def ending_by(container: Container, last: GuestExit | None, now_ns: int) -> Ending:
    """Return the end of a container from the last known end of its guest.

    If `last` is None, or is older than the container's start, the guest counts as ended from
    outside at `now_ns`.
    """
    if last is None or last.at_ns < container.started_ns:
        last = GuestExit(how="ended", asked=False, at_ns=now_ns)
    exit_code, reason = EXITS[last.how]
    return Ending(
        finished_ns=last.at_ns, exit_code=exit_code, reason=reason, message=WORDS[last.how]
    )


def gone(pod: Pod, now_ns: int) -> Pod:
    """Return the pod without its VM, which another client deleted on the bus."""
    pod = pod.model_copy(update={"machine": None})
    container = pod.active
    if container is None:
        return pod
    message = "the VM was deleted on the bus"
    end = Ending(finished_ns=now_ns, exit_code=KILLED, reason="VmDeleted", message=message)
    return ended(pod, container, end, off=False)


def ended(pod: Pod, container: Container, ending: Ending, *, off: bool) -> Pod:
    """Return the pod with the container's end.

    `off` means that the VM's record is still powered on, and must be powered off.
    """
    pod = pod.with_container(container.model_copy(update={"phase": "exited", "ending": ending}))
    return pod.with_machine(power_off=off)
