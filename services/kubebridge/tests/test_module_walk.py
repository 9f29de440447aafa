"""A reconcile returns to a module that it has left at most five times.

The profile hook of the interpreter reports each call and each return. The modules of the bridge in
which they happen are the walk; generated code, such as the constructors of dataclasses, belongs to
none. A return to the calling module counts, too.

A create looks at each field of a manifest: a template becomes a VMI, and a VMI `vm.create`. There
the packages of the core are counted. The packages in `WORDS` import only each other and are no
stops: they read a value, or describe a field or an action.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
from services.kubebridge.tests.test_endpoint_slices import guest, service
from services.kubebridge.tests.test_nodes import node
from services.kubebridge.tests.world import CLUSTER, NOW, World, world

from virtbus.kubebridge.core.node import labels
from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.service import endpoint_slices
from virtbus.kubebridge.core.service.model import KubeService
from virtbus.kubebridge.core.vm import reconcile as vm_rules
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.core.vmi.model import Vmi

RETURNS_MAX = 5
WORDS = {"objects", "fields", "runtime"}
PACKAGE = "/virtbus/kubebridge/"


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the modules through which a call goes, in order."""
    stays: list[str] = []
    stack: list[str] = []

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            module = frame.f_code.co_filename.partition(PACKAGE)[2]
            stack.append(module or (stack[-1] if stack else ""))
        elif event == "return" and stack:
            stack.pop()
        if event in {"call", "return"} and stack and stack[-1] and stays[-1:] != stack[-1:]:
            stays.append(stack[-1])

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def packages(stays: list[str]) -> list[str]:
    """Return the packages of the core through which a walk goes."""
    named = [stay.split("/")[1] for stay in stays]
    stops = [name for name in named if name not in WORDS]
    return [name for name, before in zip(stops, ["", *stops], strict=False) if name != before]


def returns(stays: list[str]) -> int:
    return len(stays) - len(set(stays))


def running() -> World:
    w = world()
    w.settle()
    return w


def starting() -> World:
    """Return a world whose VMI does not show yet that its guest runs."""
    w = world()
    w.reconcile()
    while w.step():
        pass
    w.now += timedelta(seconds=5)
    return w


def deleted() -> World:
    w = running()
    w.deletes()
    w.reconcile_vm(w, w)
    return w


WORLDS = (running, starting, deleted)


@pytest.mark.parametrize("made", WORLDS)
def test_a_reconcile_of_a_vmi_returns_to_few_modules(made: Callable[[], World]) -> None:
    w = made()
    assert w.vmi is not None
    vmi, seen = read(Vmi, w.vmi), w.seen(w.vmi)
    stays = walk(lambda: vmi_rules.reconcile(vmi, seen, {}, w.now, CLUSTER))
    assert returns(stays) <= RETURNS_MAX, stays


@pytest.mark.parametrize("made", WORLDS)
def test_a_reconcile_of_a_vm_returns_to_few_modules(made: Callable[[], World]) -> None:
    w = made()
    vm, vmi = read(Vm, w.vm), read(Vmi, w.vmi)
    stays = walk(lambda: vm_rules.reconcile(vm, vmi, w.now))
    assert returns(stays) <= RETURNS_MAX, stays


def test_a_create_of_a_vmi_returns_to_few_packages() -> None:
    w = world()
    stays = packages(walk(lambda: vm_rules.reconcile(read(Vm, w.vm), None, w.now)))
    assert returns(stays) <= RETURNS_MAX, stays


def test_a_create_of_a_vm_on_the_bus_returns_to_few_packages() -> None:
    w = world()
    w.reconcile_vm(w, w)
    assert w.vmi is not None
    vmi, seen = read(Vmi, w.vmi), w.seen(w.vmi)
    stays = packages(walk(lambda: vmi_rules.reconcile(vmi, seen, {}, w.now, CLUSTER)))
    assert stays == ["vmi", "translation", "vmi", "validation", "vmi"]


def test_a_reconcile_of_a_service_returns_to_few_modules() -> None:
    guests = [guest(number) for number in range(120)]
    web = read(KubeService, service())
    stays = walk(lambda: endpoint_slices.reconcile(web, guests, []))
    assert returns(stays) <= RETURNS_MAX, stays


def test_a_reconcile_of_a_node_returns_to_few_modules() -> None:
    stays = walk(lambda: labels.reconcile("n1", node(), None, NOW))
    assert returns(stays) <= RETURNS_MAX, stays


def test_the_walk_counts_each_return_to_a_caller() -> None:
    stays = walk(lambda: read(Vm, {"spec": {}}))
    assert stays == [
        "core/objects/unstructured.py",
        "core/vm/model.py",
        "core/objects/unstructured.py",
    ]
    assert returns(stays) == 1
