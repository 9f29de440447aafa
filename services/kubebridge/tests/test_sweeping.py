"""State of deleted objects is dropped, also by a bridge that is not the leader."""

import asyncio
from typing import Any, cast

import pytest
from services.kubebridge.tests.manifests import UID, vm

from virtbus.bus.memory import MemoryBus, MemoryServer
from virtbus.bus.tasks import background
from virtbus.kubebridge.core.translation.defaults import of_vm
from virtbus.kubebridge.edge import sweeping
from virtbus.kubebridge.edge.acting import Acting
from virtbus.kubebridge.edge.cluster import Cluster
from virtbus.kubebridge.edge.objects import Objects
from virtbus.kubebridge.edge.sweeping import Sweeping
from virtbus.kubebridge.edge.views import Known, Views
from virtbus.kubebridge.edge.work import Work


@pytest.mark.parametrize("writes", [True, False])
async def test_deleted_objects_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, *, writes: bool
) -> None:
    monkeypatch.setattr(sweeping, "INTERVAL_S", 0.01)
    bus, nobody = MemoryBus(MemoryServer()), cast("Any", None)
    known = Known(Objects(), Objects(), Views(bus, "c1"))
    there = of_vm(vm())
    known.vms.put(there)
    known.views.ended(UID)
    known.views.ended(there["metadata"]["uid"])
    acts = asyncio.Event()
    if writes:
        acts.set()
    work = Work(nobody, bus.sources)
    work.add("default/gone")
    cluster = cast("Cluster", None)
    acting = Acting(cluster, bus, known, nobody)
    async with asyncio.timeout(30), background() as tasks:
        tasks.start(Sweeping(cluster, known, acting, work, "c1", acts).run())
        while known.views.gone(UID):
            await asyncio.sleep(0.01)
    assert work.idle is not writes  # the leader reconciles it
    assert known.views.gone(there["metadata"]["uid"])
    await bus.aclose()
