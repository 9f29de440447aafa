"""A reconcile returns to a module that it has left at most five times.

`walks.py` records the calls of whole reconciles, from the read of the object to the last write, and
says which calls are stops. The second stop in a module is a return. A call into a module that waits
for its callee would be a return, too: there is none.

The reconciles of the core are also counted strictly: each change of the module is a stop, and each
return to a caller counts. A create is not, because it reads each field of a manifest.
"""

import copy
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from services.kubebridge.tests.api_server import ApiServer, Name
from services.kubebridge.tests.manifests import vm as smoke_vm
from services.kubebridge.tests.test_bridge import NAME, VM_AT, bridged, printable, until
from services.kubebridge.tests.test_endpoint_slices import guest, service
from services.kubebridge.tests.test_nodes import node
from services.kubebridge.tests.walks import (
    Call,
    again,
    calls_back,
    stays,
    stops,
    visits,
    walking,
    words,
)
from services.kubebridge.tests.world import CLUSTER, NOW, World, world

from virtbus.kubebridge.core.node import labels
from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.service import endpoint_slices
from virtbus.kubebridge.core.service.model import KubeService
from virtbus.kubebridge.core.vm import reconcile as vm_rules
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.core.vmi.model import Vmi

log = logging.getLogger(__name__)

RETURNS_MAX = 5
TRANSLATION = "core/translation/mapping.py"


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the modules through which a call of one function goes, in order."""
    with walking(root=None) as walks:
        call()
    (one,) = walks.calls
    return list(stays(one))


def returns(stays: list[str]) -> int:
    return len(again(stays))


# --- whole reconciles --------------------------------------------------------------------------
async def change(objects: ApiServer, expected: str, **spec: Any) -> None:
    """Change the VM's spec, and wait until its status shows it."""
    changed = copy.deepcopy(objects.objects[VM_AT])
    changed["spec"] |= spec
    changed["metadata"].pop("resourceVersion")
    generation = objects.change(VM_AT, changed)["metadata"]["generation"]
    await until(lambda: objects.objects[VM_AT]["status"]["desiredGeneration"] == generation)
    await until(lambda: printable(objects) == expected)


async def test_a_reconcile_returns_to_few_modules(tmp_path: Path) -> None:
    """A VM is created with a Service, changed, halted and deleted.

    `--log-cli-level=INFO` shows the returns of each reconcile by all three counts.
    """
    async with bridged(tmp_path) as (objects, controller, bridge):
        await bridge.leads.wait()
        with walking() as walks:
            objects.create(Name("nodes", "", "n1"), {"metadata": {"name": "n1"}})
            objects.create(Name("kubevirts", "k", "k"), {"metadata": {"name": "k"}})
            spec = {"selector": {"vm.kubevirt.io/name": NAME}, "ports": [{"port": 80}]}
            objects.create(Name("services", "default"), {"metadata": {"name": "web"}, "spec": spec})
            objects.create(VM_AT, smoke_vm())
            await until(lambda: any(at.plural == "endpointslices" for at in objects.objects))
            await until(lambda: printable(objects) == "Running")
            memory = {"spec": {"domain": {"memory": {"guest": "1Gi"}}}}
            await change(objects, "Running", template=memory)
            await change(objects, "Stopped", running=False)
            objects.delete(VM_AT)
            await until(lambda: VM_AT not in objects.objects)
            assert controller.vms == {}
    kinds = {one.what for one in walks.calls}
    assert kinds >= {"VirtualMachine", "VirtualMachineInstance", "Service", "Node", "KubeVirt"}
    leave_out = words()
    walked = [stops(one, leave_out) for one in walks.calls]
    assert any(TRANSLATION in one for one in walked)
    assert max(len(again(one)) for one in walked) <= RETURNS_MAX, max(walked, key=returns)
    assert [back for one in walks.calls for back in calls_back(one)] == []
    for one, found in zip(walks.calls, walked, strict=True):
        raw = len(again(list(stays(one)))), len(again(list(visits(one))))
        log.info("%s: %d, calls only: %d, stops only: %d", one.what, *raw, len(again(found)))


def test_words_and_helpers_are_no_stops_and_each_further_stop_is_a_return() -> None:
    helper, word = Call("helper"), Call("word")
    rules = Call("rules", calls=[Call("rules", calls=[helper, word])])
    reconcile = Call("runtime", calls=[rules, Call("actions", calls=[helper]), rules])
    assert list(visits(reconcile)).count("helper") == 3
    assert stops(reconcile, frozenset({"word"})) == ["runtime", "rules", "actions", "rules"]
    assert again(stops(reconcile, frozenset({"word"}))) == ["rules"]
    assert again(list(stays(Call("a", calls=[Call("b"), Call("b")])))) == ["a", "b", "a"]


def test_a_call_into_a_module_that_waits_is_found() -> None:
    back = Call("store", calls=[Call("listeners", calls=[Call("runtime")])])
    assert calls_back(Call("runtime", calls=[back])) == [
        ("runtime", "store", "listeners", "runtime")
    ]
    assert calls_back(Call("runtime", calls=[Call("store"), Call("store")])) == []


# --- the core ----------------------------------------------------------------------------------
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
