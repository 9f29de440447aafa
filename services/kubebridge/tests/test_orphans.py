"""An API server that was restored to an older state deletes no VM; a person decides (ADR 0033)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from services.kubebridge.tests.manifests import UID, put, vmi
from services.kubebridge.tests.world import CLUSTER, view

from virtbus.bus.memory import MemoryBus, MemoryServer
from virtbus.bus.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.tasks import background
from virtbus.kubebridge.core.installation.status import status
from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.runtime.actions import BusCreate, Tell
from virtbus.kubebridge.core.translation.defaults import of_vmi
from virtbus.kubebridge.core.translation.mapping import translate
from virtbus.kubebridge.edge import sweeping
from virtbus.kubebridge.edge.acting import Acting, EndedError
from virtbus.kubebridge.edge.objects import Objects
from virtbus.kubebridge.edge.sweeping import Sweeping
from virtbus.kubebridge.edge.views import Known, Views
from virtbus.kubebridge.edge.work import Work
from virtbus.schemas import subjects
from virtbus.schemas.api import VmDelete, VmUpdate
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm import VmView
from virtbus.schemas.wire import validate

NAME = "kubevirt-smoke-fedora"
KEY = f"default/{NAME}"


class Site:
    """A fake cluster and a fake controller."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryServer())
        self.known = Known(Objects(), Objects(), Views(self.bus, CLUSTER))
        self.there: Object | None = None
        self.deleted: list[str] = []
        self.updates: list[dict[str, str]] = []
        self.told: list[Tell] = []
        self.acting = Acting(cast("Any", self), self.bus, self.known, cast("Any", self))
        acts = asyncio.Event()
        acts.set()
        work = Work(cast("Any", None), self.bus.sources)
        self.sweeping = Sweeping(cast("Any", self), self.known, self.acting, work, CLUSTER, acts)
        self.known.views.answered(view(UID))

    async def get(self, *_: Any) -> Object | None:
        return self.there

    def tell(self, _: Object, what: Tell) -> None:
        self.told.append(what)

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
            tasks.start(self.sweeping.run())
            yield
        await self.bus.aclose()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Site]:
    for name in ("INTERVAL_S", "GRACE_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(sweeping, name, 0.01)
    return Site


async def until(check: Callable[[], Any]) -> None:
    while not check():
        await asyncio.sleep(0.005)


Scenario = Callable[[Site], Awaitable[None]]


async def test_a_vm_with_an_absent_vmi_is_kept_marked_and_reported(
    site: Callable[[], Site],
) -> None:
    here = site()
    async with here.runs():
        await until(lambda: here.updates)
        await asyncio.sleep(0.2)  # many sweeps
        assert here.deleted == []
        assert [list(one) for one in here.updates] == [[ORPHANED]]
        assert here.sweeping.orphans == {UID: KEY}
        found = here.known.views.get(UID)
        assert found is not None
        assert "no VirtualMachineInstance" in found.annotations[ORPHANED]


async def test_a_new_vmi_of_an_orphans_name_gets_the_reason(site: Callable[[], Site]) -> None:
    here = site()
    other = of_vmi(
        put(vmi(), {"metadata.name": NAME, "metadata.uid": "0192f0c1-2d3e-7abc-8def-00000000beef"})
    )
    here.known.vmis.put(other)
    here.there = other
    async with here.runs():
        await until(lambda: here.updates)
        assert "another VirtualMachineInstance" in here.updates[0][ORPHANED]
        assert here.told[0].reason == "OrphanHeld"
        assert f"virtbus vm delete {UID}" in here.told[0].message
        assert here.deleted == []
        create = translate(other, {}, CLUSTER).create
        assert create is not None
        with pytest.raises(EndedError):
            await here.acting._ask(BusCreate(create))
        (refused,) = here.acting.memo.refused.values()
        assert refused.reason == "name_held_by_orphan"
        assert f"is held by VM {UID}" in refused.message


async def test_a_vm_whose_vmi_was_deleted_is_deleted(site: Callable[[], Site]) -> None:
    """A slow bridge creates the VM after its VMI is gone."""
    here = site()
    mine = of_vmi(put(vmi(), {"metadata.name": NAME, "metadata.uid": UID}))
    here.known.vmis.put(mine)
    here.known.vmis.deleted(mine)
    async with here.runs():
        await until(lambda: here.deleted)
        assert here.deleted[0] == UID
        assert here.updates == []
        assert here.sweeping.orphans == {}


async def test_a_vmi_that_comes_back_removes_the_mark(site: Callable[[], Site]) -> None:
    """The API server was restored once more, to a newer state."""
    here = site()
    async with here.runs():
        await until(lambda: here.updates)
        mine = of_vmi(put(vmi(), {"metadata.name": NAME, "metadata.uid": UID}))
        here.there = mine
        here.known.vmis.put(mine)
        await until(lambda: here.updates[-1] == {})
        await until(lambda: here.sweeping.orphans == {})
        assert here.deleted == []


def test_the_kubevirt_object_lists_the_orphans() -> None:
    def told(orphans: dict[str, str]) -> dict[str, str]:
        found = status(1, orphans)["conditions"]
        return next(one for one in found if one["type"] == "OrphanedVirtualMachines")

    assert told({})["status"] == "False"
    said = told({UID: KEY})
    assert said["status"] == "True"
    assert f"{KEY} ({UID})" in said["message"]
