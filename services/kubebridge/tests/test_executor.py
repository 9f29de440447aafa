"""Refusals of the API server are retried even if no watched object changes."""

import asyncio
from typing import Any, cast

import pytest
from services.kubebridge.tests.manifests import put, vm, vmi
from services.kubebridge.tests.world import NOW, reconcile_vm

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.kubebridge.core.objects.unstructured import Object
from virtbus.kubebridge.core.runtime.controller import VM, VMI, Key, RecordEvent
from virtbus.kubebridge.core.translation.defaults import of_vm
from virtbus.kubebridge.core.vm import reconcile as vm_rules
from virtbus.kubebridge.edge.cluster import StatusError
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer

KEY = Key(VM, "default", "kubevirt-smoke-fedora")


class Refusing:
    """A cluster with one VM. It refuses the VM's VMI and records the events."""

    def __init__(self, **refusal: Any) -> None:
        self.refusal = refusal
        self.asked = 0
        self.events: list[str] = []
        self.vm = of_vm(vm(running=None, runStrategy="Always"))
        self.vm["metadata"]["resourceVersion"] = "1"
        bus, anything = MemoryBus(MemoryServer()), cast("Any", self)
        vms = VmInformer(bus, "c1")
        self.reconciler = Reconciler(anything, bus, vms, anything, asyncio.Event())
        self.vms, self.vmis = self.reconciler.store(VM), self.reconciler.store(VMI)
        self.vms.put(self.vm)
        self._controller = vm_rules.controller(self.vmis)

    async def look(self) -> float:
        return await self.reconciler.reconcile(self._controller, KEY)

    async def create(self, *_: Any) -> None:
        self.asked += 1
        raise StatusError(self.refusal)

    async def patch(self, *args: Any, how: str) -> Object:
        (status,) = (one["value"] for one in args[2] if one["path"] == "/status")
        version = str(int(self.vm["metadata"]["resourceVersion"]) + 1)
        meta = {**self.vm["metadata"], "resourceVersion": version}
        self.vm = {**self.vm, "metadata": meta, "status": status}
        return self.vm

    def record(self, _: Object, what: RecordEvent) -> None:
        self.events.append(what.reason)


@pytest.mark.parametrize("code", [403, 422])
async def test_a_refused_vmi_is_retried(code: int) -> None:
    here = Refusing(code=code, reason="Forbidden", message="exceeded quota")
    again_s = [await here.look() for _ in range(4)]
    assert here.asked == 4
    assert all(0 < one <= 10 for one in again_s)
    assert here.events == ["FailedCreate"]


async def test_a_refusal_for_an_earlier_object_of_the_name_is_forgotten() -> None:
    here = Refusing(code=403, reason="Forbidden", message="exceeded quota")
    await here.look()
    uid = here.vm["metadata"]["uid"]
    assert here.reconciler.executor.refused(KEY, uid) == (403, "Forbidden", "exceeded quota")
    assert here.reconciler.executor.refused(KEY, "another") is None
    assert here.reconciler.executor.refused(KEY, uid) is None


async def test_a_quota_conflict_ends_the_actions() -> None:
    here = Refusing(code=409, reason="Conflict", message="resourcequotas: modified")
    assert 0 < await here.look() <= 10
    assert here.events == []


async def test_an_existing_vmi_counts_as_created() -> None:
    here = Refusing(code=409, reason="AlreadyExists", message="it is there")
    assert await here.look() == 0
    assert here.events == ["SuccessfulCreate"]


async def test_a_delete_has_the_version_that_was_read() -> None:
    """Another client may have released the VMI while the VM's status was written."""
    deleted: list[tuple[str, ...]] = []

    class Changing(Refusing):
        async def patch(self, *args: Any, how: str) -> Object:
            self.vmis.put(put(owned, {"metadata.resourceVersion": "8"}))
            return await super().patch(*args, how=how)

        async def delete(self, _: Any, *what: str) -> None:
            deleted.append(what)

    here = Changing()
    here.vm = put(here.vm, {"spec.runStrategy": "Halted"})
    owned = put(vmi(), {"metadata.resourceVersion": "7"})
    owned["metadata"]["ownerReferences"] = [{"uid": here.vm["metadata"]["uid"]}]
    here.vmis.put(owned)
    actions = reconcile_vm(here.vm, owned, NOW)
    await here.reconciler.executor.execute(actions, KEY, here.vm)
    ((_, _, uid, version),) = deleted
    assert (uid, version) == (owned["metadata"]["uid"], "7")


def test_a_long_refusal_is_cut() -> None:
    answer = StatusError({"code": 422, "message": f"annotations: {'k' * 1_000_000}: invalid"})
    assert answer.message.startswith("annotations: kkk")
    assert len(answer.message) < 10_000
    assert len(str(answer)) < 10_000
