"""An API server that was restored to an older state deletes no VM; a person decides (ADR 0033)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from services.kubebridge.tests.manifests import UID, put, vmi
from services.kubebridge.tests.world import CLUSTER, NOW, view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.installation.controller import status
from virtbus.kubebridge.core.objects.unstructured import Object
from virtbus.kubebridge.core.runtime.controller import (
    BUS_VM,
    VM,
    VMI,
    Inputs,
    Key,
    RecordEvent,
    Refused,
)
from virtbus.kubebridge.core.translation.defaults import of_vmi
from virtbus.kubebridge.core.vmi.orphans import Orphans
from virtbus.kubebridge.core.vmi.reconcile import Instances
from virtbus.kubebridge.edge.cluster import Listing
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.schemas import subjects
from virtbus.schemas.api import VmDelete, VmUpdate
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

NAME = "kubevirt-smoke-fedora"
KEY = f"default/{NAME}"


class Silent:
    """Guest agents that never answer."""

    def get(self, _: str) -> None: ...

    def asked(self, _: str) -> bool:
        return True


class Site:
    """A fake cluster and a fake controller."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryServer())
        self.views = VmInformer(self.bus, CLUSTER)
        self.there: Object | None = None
        self.deleted: list[str] = []
        self.updates: list[dict[str, str]] = []
        self.events: list[RecordEvent] = []
        leads, anything = asyncio.Event(), cast("Any", self)
        leads.set()
        self.reconciler = Reconciler(anything, self.bus, self.views, anything, leads)
        self.vms, self.vmis = self.reconciler.store(VM), self.reconciler.store(VMI)
        self.reconciler.source(BUS_VM, self.views)
        self.orphans = Orphans(CLUSTER, self.vms, self.vmis, self.views, (0.01, 0.01))
        self.reconciler.add(self.orphans.controller())
        self.views.answered(view(UID))

    async def pages(self, *_: Any) -> AsyncIterator[Listing]:
        """Keep what the test stores: this list never ends."""
        await asyncio.get_running_loop().create_future()
        yield Listing([], "1")

    async def get(self, *_: Any) -> Object | None:
        return self.there

    def record(self, _: Object, what: RecordEvent) -> None:
        self.events.append(what)

    async def update(self, request: Request) -> VmView:
        want = validate(VmUpdate, request.data)
        self.updates.append(dict(want.annotations or {}))
        return view(UID, annotations=want.annotations, revision=want.revision + 1)

    async def delete(self, request: Request) -> VmView:
        self.deleted.append(str(validate(VmDelete, request.data).uid))
        return view(UID, deleting=True, revision=9)

    async def create(self, request: Request) -> VmView:
        del request
        raise VirtbusError(Code.CONFLICT, "name_taken", "the name is taken")

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        verbs = {"update": self.update, "delete": self.delete, "create": self.create}
        ends = [Endpoint(v, subjects.api("vm", v), handler) for v, handler in verbs.items()]
        async with (
            asyncio.timeout(10),
            self.bus.serve(ServiceInfo("c", "1.0.0"), ends),
            background() as tasks,
        ):
            for reflector in self.reconciler.reflectors.values():
                reflector.synced.set()
            tasks.start(self.reconciler.run())
            self.reconciler.queue.add(Key(BUS_VM, "default", NAME))
            yield
        await self.bus.aclose()


async def until(check: Callable[[], Any]) -> None:
    while not check():
        await asyncio.sleep(0.005)


async def test_a_vm_with_an_absent_vmi_is_kept_marked_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Site()
    async with here.runs():
        await until(lambda: here.updates)
        await asyncio.sleep(1.0)  # many checks
        assert here.deleted == []
        assert [list(one) for one in here.updates] == [[ORPHANED]]
        assert here.orphans.kept == {UID: KEY}
        found = here.views.get(UID)
        assert found is not None
        assert "no VirtualMachineInstance" in found.annotations[ORPHANED]
    assert "orphan_held" in {getattr(line, "code", "") for line in caplog.records}


async def test_a_new_vmi_of_an_orphans_name_gets_the_reason() -> None:
    here = Site()
    other = of_vmi(
        put(vmi(), {"metadata.name": NAME, "metadata.uid": "0192f0c1-2d3e-7abc-8def-00000000beef"})
    )
    here.vmis.put(other)
    here.there = other
    async with here.runs():
        await until(lambda: here.updates)
        assert "another VirtualMachineInstance" in here.updates[0][ORPHANED]
        assert here.events[0].reason == "OrphanHeld"
        assert f"virtbus vm delete {UID}" in here.events[0].message
        assert here.deleted == []
        other["metadata"]["finalizers"] = []
        instances = Instances(here.vmis, here.views, cast("Any", Silent()), CLUSTER)
        key = Key(VMI, "default", NAME)
        taken = Refused(Code.CONFLICT, "name_taken", "the name is taken")
        actions = instances.controller().reconcile(key, Inputs(other, NOW, 0.0, {}, taken))
        (event,) = (one for one in actions if isinstance(one, RecordEvent))
        assert f"is held by VM {UID}" in event.message


async def test_a_vm_whose_vmi_was_deleted_is_deleted() -> None:
    """A slow bridge creates the VM after its VMI is gone."""
    here = Site()
    mine = of_vmi(put(vmi(), {"metadata.name": NAME, "metadata.uid": UID}))
    here.vmis.put(mine)
    here.vmis.deleted(mine)
    async with here.runs():
        await until(lambda: here.deleted)
        assert here.deleted[0] == UID
        assert here.updates == []
        assert here.orphans.kept == {}


async def test_a_vmi_that_comes_back_removes_the_mark() -> None:
    """The API server was restored once more, to a newer state."""
    here = Site()
    async with here.runs():
        await until(lambda: here.updates)
        mine = of_vmi(put(vmi(), {"metadata.name": NAME, "metadata.uid": UID}))
        here.there = mine
        here.vmis.put(mine)
        await until(lambda: here.updates[-1] == {})
        await until(lambda: here.orphans.kept == {})
        assert here.deleted == []


def test_the_kubevirt_object_lists_the_orphans() -> None:
    def condition(orphans: dict[str, str]) -> dict[str, str]:
        found = status(1, orphans)["conditions"]
        return next(one for one in found if one["type"] == "OrphanedVirtualMachines")

    assert condition({})["status"] == "False"
    said = condition({UID: KEY})
    assert said["status"] == "True"
    assert f"{KEY} ({UID})" in said["message"]
