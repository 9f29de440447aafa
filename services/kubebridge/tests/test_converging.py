"""The final state equals the requested one, even if inputs are late or missing."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.kubebridge.tests.world import World, world

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.runtime.controller import Action, BusCall
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy


def calls(verb: str, actions: list[Action]) -> bool:
    """Return True if one of the actions sends the verb to the bus."""
    return any(isinstance(one, BusCall) and one.verb == verb for one in actions)


STEPS = st.sampled_from(
    [
        *("reconcile", "stale vm", "stale vmi", "stale bus", "stale all", "remember", "remember"),
        *("step", "step", "step", "crash", "shutdown", "restart", "image", "lost"),
        *RunStrategy,
    ]
)


def play(  # noqa: C901  a row a step
    w: World, remembered: list[World], step: str, pick: int
) -> None:
    old = remembered[pick % len(remembered)]
    match step:
        case "reconcile":
            w.reconcile()
        case "stale vm":
            w.reconcile(vm=old)
        case "stale vmi":
            w.reconcile(vmi=old)
        case "stale bus":
            w.reconcile(bus=old)
        case "stale all":
            w.reconcile(old, old, old)
        case "remember":
            remembered.append(w.copy())
        case "step":
            w.step()
        case "crash" | "shutdown":
            w.ends(well=step == "shutdown")
        case "restart":
            if w.vmi is not None and read(Vm, w.vm).strategy not in {"Halted", "Once"}:
                w.asks({"action": "Stop", "uid": w.uid}, {"action": "Start"})
        case "image":
            w.step(to=VmState.FAILED, reason="image_not_found", message="no such image")
        case "lost":
            w.step(to=VmState.UNKNOWN, reason="node_down", message="silent")
            w.step(to=VmState.STARTING)
        case strategy:
            w.user(running=None, runStrategy=str(strategy))


@settings(max_examples=25, deadline=None)  # a restart of a halted VM is refused (`power`)
@given(st.lists(st.tuples(STEPS, st.integers(0, 50)), max_size=40), st.sampled_from(RunStrategy))
def test_any_order_of_stale_inputs_converges(
    steps: list[tuple[str, int]], strategy: RunStrategy
) -> None:
    w = world()
    remembered = [w.copy()]
    for step, pick in steps:
        play(w, remembered, step, pick)
        live = [one for one in w.views.values() if not one.deleting]
        assert len(live) <= max(1, w.made)
    w.user(running=None, runStrategy=str(strategy))
    w.settle()
    assert set(w.views) <= {w.uid}, "a VM that no VMI stands for"
    if strategy is RunStrategy.ALWAYS:
        assert (w.printable, w.views[w.uid].state) == ("Running", VmState.RUNNING)
    if strategy is RunStrategy.HALTED:
        assert (w.vmi, w.views, w.printable) == (None, {}, "Stopped")
    writes = w.writes
    for old in (w, w.copy()):
        assert w.reconcile(old, old, old) == []
    assert w.writes == writes
    w.deletes()
    w.settle()
    assert (w.vm, w.vmi, w.views) == (None, None, {})


def test_a_create_costs_few_writes() -> None:
    w = world()
    for _ in range(10):
        w.reconcile()
        w.step()
    assert w.printable == "Running"
    created = 1
    assert created + w.writes + len(w.events) <= 10
    assert w.events == ["SuccessfulCreate", "Started"]


def test_a_bridge_that_sees_only_the_end_of_a_create_writes_less() -> None:
    w = world()
    w.reconcile()
    w.reconcile()
    while w.step():
        pass
    w.reconcile()
    w.reconcile()
    assert w.printable == "Running"
    assert 1 + w.writes + len(w.events) <= 8


def test_an_applied_vm_runs_and_its_status_shows_it() -> None:
    w = world()
    w.settle()
    assert w.vm is not None
    assert w.vmi is not None
    status = w.vm["status"]
    assert (status["created"], status["ready"], status["runStrategy"]) == (True, True, "Always")
    assert w.vmi["metadata"]["labels"] == {
        "kubevirt.io/nodeName": "n1",
        "vm.kubevirt.io/name": "kubevirt-smoke-fedora",
    }
    (owner,) = w.vmi["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("VirtualMachine", w.vm["metadata"]["uid"])
    phases = [one["phase"] for one in w.vmi["status"]["phaseTransitionTimestamps"]]
    assert phases == ["Pending", "Scheduling", "Scheduled", "Running"]
    assert w.vmi["status"]["nodeName"] == "n1"


@pytest.mark.parametrize(("well", "on_failure"), [(True, (1, "Stopped")), (False, (2, "Running"))])
def test_the_run_strategy_decides_about_an_ended_guest(
    *, well: bool, on_failure: tuple[int, str]
) -> None:
    made = {}
    for strategy in RunStrategy:
        w = world(running=None, runStrategy=str(strategy))
        if strategy is RunStrategy.MANUAL:
            w.asks({"action": "Start"})
        w.settle()
        w.ends(well=well)
        w.settle()
        made[strategy] = (w.made, w.printable)
    assert made == {
        RunStrategy.ALWAYS: (2, "Running"),
        RunStrategy.RERUN_ON_FAILURE: on_failure,
        RunStrategy.ONCE: (1, "Stopped"),
        RunStrategy.MANUAL: (1, "Stopped"),
        RunStrategy.HALTED: (0, "Stopped"),
    }


def test_a_restart_replaces_the_vmi() -> None:
    w = world()
    w.settle()
    first = w.uid
    w.asks({"action": "Stop", "uid": first}, {"action": "Start"})
    w.settle()
    assert (w.made, w.printable) == (2, "Running")
    assert w.vm is not None
    assert "stateChangeRequests" not in w.vm["status"]
    assert first in w.gone


def test_a_paused_start_changes_only_the_vmi() -> None:
    w = world(running=None, runStrategy="Manual")
    w.settle()
    w.asks({"action": "Start", "data": {"paused": "true"}})
    w.reconcile()
    assert w.vmi is not None
    assert w.vmi["spec"]["startStrategy"] == "Paused"


def test_an_orphaned_vmi_is_kept() -> None:
    w = world()
    w.settle()
    w.deletes(orphan=True)
    w.settle()
    assert w.vm is not None
    assert w.vm["metadata"]["finalizers"] == ["orphan"]
    assert w.views[w.uid].state is VmState.RUNNING


def test_a_failed_image_is_retried_with_growing_delays() -> None:
    w = world()
    w.settle()
    w.step(to=VmState.FAILED, reason="image_not_found", message="no such image")
    said: list[Any] = []
    starts = 0
    for _ in range(400):
        w.now += timedelta(seconds=5)
        starts += calls("start", w.reconcile())
        if w.views[w.uid].state is VmState.PREPARING:
            w.step(to=VmState.FAILED, reason="image_not_found", message="no such image")
        said.append(w.printable)
    assert said[0] == "Running"
    assert starts == pytest.approx(11, abs=2)


def test_a_vm_that_was_deleted_on_the_bus_fails_its_vmi_and_is_replaced() -> None:
    w = world()
    w.settle()
    first = w.uid
    w.views.clear()
    w.gone.add(first)
    w.settle()
    assert (w.made, w.printable) == (2, "Running")


def test_a_create_is_repeated_until_the_vm_is_seen() -> None:
    w = world()
    w.reconcile_vm(w, w)
    before = w.copy()
    for _ in range(2):
        assert calls("create", w.reconcile_vmi(before, before))
    assert len(w.views) == 1
