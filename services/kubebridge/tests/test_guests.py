"""The aggregated API's requests to the node of a guest."""

import pytest
from services.kubebridge.tests.manifests import UID
from services.kubebridge.tests.world import view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.kubebridge.edge.web.error_middleware import RefusedError
from virtbus.kubebridge.edge.web.guest_proxy import Guests
from virtbus.schemas import subjects
from virtbus.schemas.guest import GuestQuestion
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm_status import VmView


async def test_a_vm_without_a_node_is_a_conflict() -> None:
    async def get(_: Request) -> VmView:
        return view(UID, node=UNPLACED)

    bus = MemoryBus(MemoryServer())
    endpoint = Endpoint("get", subjects.api("vm", "get"), get)
    async with bus.serve(ServiceInfo("controller", "1.0.0"), [endpoint]):
        with pytest.raises(RefusedError) as refused:
            await Guests(bus).tell(UID, [GuestQuestion.OS])
    assert refused.value.refusal.code == 409
    await bus.aclose()
