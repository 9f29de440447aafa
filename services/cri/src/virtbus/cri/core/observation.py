"""Derives the phases of a pod's containers from its VM on the bus, by one table.

Only a view that shows the VM after the CRI's last change counts. Absence proves nothing: a
container ends only if its VM is known to have ended. A view of an unreachable node changes nothing.
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
"""A VM's state → its meaning for the container whose guest the VM has."""

KILLED = 137
"""128 + SIGKILL, as for a container whose process was killed."""
START_FAILED = 128
"""The exit code that containerd gives to a container whose start failed."""

EXITS: Mapping[str, tuple[int, str]] = {
    "shut down": (0, "Completed"),
    "ended": (KILLED, "Error"),
    "crashed": (134, "EmulatorDied"),
    "panicked": (1, "GuestPanicked"),
    "watchdog": (124, "WatchdogExpired"),
}
"""The way of a guest's end → exit code and reason. 0 means that it powered itself off."""

WORDS: Mapping[str, str] = {
    "shut down": "the guest powered itself off",
    "ended": "the guest was ended from outside",
    "crashed": "the guest's emulator died, or its host restarted",
    "panicked": "the guest's kernel panicked",
    "watchdog": "the guest's watchdog powered it off",
}


def observed(pod: Pod, view: VmView, now_ns: int) -> Pod:
    """Return the pod after a view of its VM."""
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


def _network(machine: Machine, view: VmView) -> dict[str, object]:
    """Return the network's changes in a view; none if the view is older than the wanted state."""
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
    """Return True before the node's first report about a start.

    The record is powered on, and the state is still Stopped. A VM whose guest ended by itself is
    Succeeded or Failed; it is Stopped only if its record is powered off.
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
    """Return the end of a container from its guest's last end.

    If the last end was before this run, the guest counts as ended from outside, now.
    """
    if last is None or last.at_ns < container.started_ns:
        last = GuestExit(how="ended", asked=False, at_ns=now_ns)
    exit_code, reason = EXITS[last.how]
    return Ending(
        finished_ns=last.at_ns, exit_code=exit_code, reason=reason, message=WORDS[last.how]
    )


def gone(pod: Pod, now_ns: int) -> Pod:
    """Return the pod after its VM was deleted on the bus by somebody else."""
    pod = pod.model_copy(update={"machine": None})
    container = pod.active
    if container is None:
        return pod
    message = "the VM was deleted on the bus"
    end = Ending(finished_ns=now_ns, exit_code=KILLED, reason="VmDeleted", message=message)
    return ended(pod, container, end, off=False)


def ended(pod: Pod, container: Container, ending: Ending, *, off: bool) -> Pod:
    """Return the pod with the container's end; `off`: its VM's record must be powered off."""
    pod = pod.with_container(container.model_copy(update={"phase": "exited", "ending": ending}))
    return pod.with_machine(power_off=off)
