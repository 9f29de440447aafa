"""Phases and the status of a VM, row by row of their tables."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from services.kubebridge.tests.manifests import UID, find, put, vm, vmi
from services.kubebridge.tests.world import GONE, NOW, pair, reconcile_vm, view, vmi_of, world

from virtbus.kubebridge.core.objects.metadata import VM_FINALIZER
from virtbus.kubebridge.core.objects.unstructured import read, stamp
from virtbus.kubebridge.core.runtime.controller import (
    Delete,
    Patch,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.vm import run_strategies
from virtbus.kubebridge.core.vm import status as vm_status
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vm.run_strategies import (
    TABLE,
    Decision,
    PendingRequest,
    VmiPresence,
    back_off_s,
)
from virtbus.kubebridge.core.vm.status import PRINTABLE, printable
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.phases import PHASE_OF, phase_of
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy
from virtbus.schemas.vm_status import GUEST_ENDED

PAUSED_START = {"action": "Start", "data": {"paused": "true"}}


# --- phases ------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", VmState)
def test_each_state_gives_a_phase_or_keeps_it(state: VmState) -> None:
    after = phase_of(
        VmiPhase.PENDING,
        view(UID, state=state, reason=GUEST_ENDED, failure_stage="guest"),
        gone=False,
    )
    assert after == (PHASE_OF[state] or VmiPhase.PENDING)


@pytest.mark.parametrize("before", sorted(FINAL))
@pytest.mark.parametrize("state", VmState)
def test_a_final_phase_never_changes(before: VmiPhase, state: VmState) -> None:
    assert phase_of(before, view(UID, state=state), gone=False) is before
    assert phase_of(before, None, gone=True) is before


def test_a_failed_start_is_not_final() -> None:
    failed = view(UID, state=VmState.FAILED, reason="image_not_found")
    assert phase_of(VmiPhase.SCHEDULED, failed, gone=False) is VmiPhase.SCHEDULED
    assert phase_of(VmiPhase.PENDING, failed, gone=False) is VmiPhase.SCHEDULING


def test_a_silent_node_makes_a_phase_unknown_until_it_is_back() -> None:
    lost = view(UID, state=VmState.UNKNOWN)
    assert phase_of(VmiPhase.RUNNING, lost, gone=False) is VmiPhase.UNKNOWN
    assert (
        phase_of(VmiPhase.UNKNOWN, view(UID, state=VmState.RUNNING), gone=False) is VmiPhase.RUNNING
    )


# --- printableStatus ---------------------------------------------------------------------------
def made(phase: str = "", **conditions: tuple[bool, str]) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": str(on), "reason": reason}
        for kind, (on, reason) in conditions.items()
    ]
    return put(vmi(), {"status": {"phase": phase, "conditions": listed}})


UNHAPPY = {"Synchronized": (False, "ErrImagePull"), "PodScheduled": (False, "Unschedulable")}
ROWS = {
    "Terminating": pair(put(vm(), {"metadata.deletionTimestamp": GONE}), made("Running")),
    "Stopping": pair(vm(), put(made("Running"), {"metadata.deletionTimestamp": GONE})),
    "Paused": pair(vm(), made("Running", Paused=(True, "PausedByUser"), **UNHAPPY)),
    "Running": pair(vm(), made("Running", **UNHAPPY)),
    "ErrorUnschedulable": pair(vm(), made("Pending", **UNHAPPY)),
    "ErrImagePull": pair(vm(), made("Scheduling", Synchronized=(False, "ErrImagePull"))),
    "ImagePullBackOff": pair(vm(), made("Scheduling", Synchronized=(False, "ImagePullBackOff"))),
    "Starting": pair(vm(), made("Scheduled", Synchronized=(False, "FailedStart"))),
    "CrashLoopBackOff": pair(
        put(vm(), {"status": {"startFailure": {"consecutiveFailCount": 1}}}), None
    ),
    "Stopped": pair(vm(), made("Succeeded")),
    "Unknown": pair(vm(), made("Unknown")),
}


def test_each_status_has_its_example_in_the_order_of_precedence() -> None:
    assert list(ROWS) == [*(name for name, _ in PRINTABLE), "Unknown"]


@pytest.mark.parametrize("name", ROWS)
def test_a_printable_status(name: str) -> None:
    assert printable(ROWS[name]) == name


def test_a_vm_about_to_start_is_starting() -> None:
    assert printable(pair(vm(), None, starts=True)) == "Starting"


def test_a_new_vm_has_its_first_status_when_its_vmi_runs_or_after_a_second() -> None:
    made = vm() | {"metadata": vm()["metadata"] | {"finalizers": [VM_FINALIZER]}}
    instance = vmi_of(made, paused=False)
    instance["metadata"]["creationTimestamp"] = stamp(NOW)

    def actions(after_s: float, *, phase: str = "Pending", before: str = "") -> list[Any]:
        status = {"status": {"printableStatus": before}} if before else {}
        seen = instance | {"status": {"phase": phase}}
        now = NOW + timedelta(seconds=after_s)
        return reconcile_vm(made | status, seen, now)

    assert actions(0.4) == [Requeue(0.6)]
    for said in (
        actions(1.0),
        actions(-300.0),  # the API server's clock is ahead
        actions(0.4, phase="Running"),
        actions(0.4, before="Running"),
    ):
        assert [type(one) for one in said] == [Patch]


# --- run strategies ----------------------------------------------------------------------------
def test_cases_of_the_table_of_run_strategies() -> None:
    decisions = {
        (strategy, has): {
            TABLE.get((strategy, has, asked), Decision.NOTHING) for asked in PendingRequest
        }
        for strategy in RunStrategy
        for has in VmiPresence
    }
    for strategy in RunStrategy:
        assert decisions[strategy, VmiPresence.ENDING] == {Decision.NOTHING}
    assert decisions[RunStrategy.ONCE, VmiPresence.FAILED] == {Decision.NOTHING}
    assert decisions[RunStrategy.HALTED, VmiPresence.ALIVE] == {Decision.STOP}
    assert decisions[RunStrategy.MANUAL, VmiPresence.NONE] == {Decision.NOTHING, Decision.START}


def test_a_strategy_is_read_from_either_field() -> None:
    assert read(Vm, vm()).strategy is RunStrategy.ALWAYS
    assert read(Vm, vm(running=False)).strategy is RunStrategy.HALTED
    assert read(Vm, vm(running=None, runStrategy="Once")).strategy is RunStrategy.ONCE


def test_a_stop_is_met_once_its_vmi_is_gone_and_later_requests_stay() -> None:
    stop, start = {"action": "Stop", "uid": "old"}, {"action": "Start"}
    asked = put(vm(), {"status": {"stateChangeRequests": [stop, start]}})
    for instance, left in ((None, [start]), (made("Running"), []), (made("Failed"), [start])):
        seen = read(Vmi, instance) if instance is not None else None
        found = run_strategies.open_requests(read(Vm, asked), seen)
        assert [one.raw for one in found] == left


@pytest.mark.parametrize(("count", "least"), [(1, 10), (2, 40), (3, 90), (4, 160), (9, 300)])
def test_failed_starts_are_retried_with_growing_delays(count: int, least: int) -> None:
    assert least <= back_off_s(count, UID) <= min(least * 3 // 2, 300)


def start_failure(vm: Any, vmi: Any, now: datetime) -> dict[str, Any]:
    return vm_status.start_failure(read(Vm, vm), read(Vmi, vmi), now)


def test_a_vmi_that_never_ran_is_counted_once_and_delays_the_next() -> None:
    failed = made("Failed")
    counted = start_failure(vm(), failed, NOW)
    assert counted["consecutiveFailCount"] == 1
    again = put(vm(), {"status": {"startFailure": counted}})
    assert start_failure(again, failed, NOW + timedelta(seconds=5)) == counted
    actions = reconcile_vm(again, None, NOW)
    (wait,) = [one for one in actions if isinstance(one, Requeue)]
    assert 10 <= wait.after_s <= 15
    ran = put(made("Failed"), {"status.phaseTransitionTimestamps": [{"phase": "Running"}]})
    assert start_failure(again, ran, NOW) == {}


# --- a VM --------------------------------------------------------------------------------------
def test_a_template_that_makes_another_guest_requires_a_restart() -> None:
    w = world()
    w.settle()
    assert w.vm is not None
    w.vm["spec"]["template"]["spec"]["tolerations"] = [{"key": "a"}]
    w.user()
    w.settle()
    assert find(w.vm["status"]["conditions"], "RestartRequired") == {}
    assert (w.vm["status"]["observedGeneration"], w.vm["status"]["desiredGeneration"]) == (1, 2)
    w.vm["spec"]["template"]["spec"]["domain"]["cpu"]["cores"] = 2
    w.user()
    w.settle()
    assert (w.vm["status"]["observedGeneration"], w.vm["status"]["desiredGeneration"]) == (1, 3)
    assert find(w.vm["status"]["conditions"], "RestartRequired")["status"] == "True"
    assert w.made == 1
    w.asks({"action": "Stop", "uid": w.uid}, {"action": "Start"})
    w.settle()
    assert find(w.vm["status"]["conditions"], "RestartRequired") == {}


@pytest.mark.parametrize(
    "change",
    [
        {"hostname": "other"},
        {"volumes.0.containerDisk.imagePullSecret": "other"},
        {"volumes.2.cloudInitNoCloud": {"secretRef": {"name": "other"}}},
        {"volumes.3": {"name": "app", "configMap": {"name": "app"}}},
    ],
)
def test_a_changed_host_name_or_reference_requires_a_restart(change: dict[str, Any]) -> None:
    w = world()
    w.settle()
    assert w.vm is not None
    put(w.vm, {f"spec.template.spec.{path}": value for path, value in change.items()})
    w.user()
    w.settle()
    assert find(w.vm["status"]["conditions"], "RestartRequired")["status"] == "True"


@pytest.mark.parametrize("said", ["", "soon", "9" * 19, "9" * 5000])
def test_an_invalid_generation_annotation_is_ignored(said: str) -> None:
    w = world()
    w.settle()
    assert w.vm is not None
    assert w.vmi is not None
    w.vmi["metadata"]["annotations"]["kubevirt.io/vm-generation"] = said
    w.vm["spec"]["template"]["spec"]["hostname"] = "other"
    w.user()
    w.settle()
    assert w.vm["status"]["observedGeneration"] == w.vm["metadata"]["generation"]


def test_a_failed_status_write_does_not_delay_a_delete() -> None:
    w = world()
    w.settle()
    assert w.vm is not None
    w.deletes()
    first, *others = reconcile_vm(w.vm, w.vmi, NOW)
    assert isinstance(first, Delete)
    assert [type(one).__name__ for one in others] == ["Patch"]


def test_a_paused_start_of_a_halted_vm_is_reconciled_again() -> None:
    halted = put(
        vm(running=False),
        {"status": {"runStrategy": "Halted", "stateChangeRequests": [PAUSED_START]}},
    )
    write, *others = reconcile_vm(halted, None, NOW)
    assert isinstance(write, Patch | RecordEvent)
    assert any(isinstance(one, Requeue) for one in others), "nobody tells a bridge what it wrote"


def test_a_vmi_of_another_owner_is_not_touched() -> None:
    (write,) = reconcile_vm(put(vm(), {"metadata.finalizers": ["a"]}), made("Running"), NOW)
    assert isinstance(write, Patch)
    said = write.changes["status"]
    assert "is not this VM's" in find(said["conditions"], "Failure")["message"]


def test_a_deleted_vm_does_not_wait_for_a_vmi_of_another_owner() -> None:
    deleted = put(vm(), {"metadata.deletionTimestamp": GONE, "metadata.finalizers": [VM_FINALIZER]})
    actions = reconcile_vm(deleted, made("Running"), NOW)
    assert actions == [Patch({"metadata": {"finalizers": []}})]


def test_a_refused_vmi_is_reported_and_retried() -> None:
    w = world()
    assert w.vm is not None
    actions = reconcile_vm(w.vm, None, NOW, failed="quota")
    assert [type(one).__name__ for one in actions] == [
        *("Patch", "RecordEvent", "Create", "Requeue"),
    ]
    assert actions[1] == RecordEvent(
        "FailedCreate", "Error creating virtual machine instance: quota", warning=True
    )
    w.act(actions, w.vm, w.vm)
    assert not any(isinstance(one, RecordEvent) for one in reconcile_vm(w.vm, None, NOW, "quota"))
