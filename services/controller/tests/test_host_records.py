"""A host that lists its VMs without end, or slowly, stops neither creates nor a rebuild."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from services.controller.tests.fleets import record, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import make, vm
from services.controller.tests.virtual import World

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.edge.host_records import PAGES
from virtbus.controller.edge.living_claims import ALL_S
from virtbus.schemas import subjects
from virtbus.schemas.node_rpc import KnownRecords


@asynccontextmanager
async def endless(made: World, *, delay_s: float = 0.0) -> AsyncIterator[list[int]]:
    """The agent of n2 has another page after each page; yield a list with one item a request."""
    asked: list[int] = []

    async def records(_: Request) -> KnownRecords:
        await asyncio.sleep(delay_s)
        asked.append(0)
        return KnownRecords(node="n2", records=(record(9, node="n2"),), more=True)

    one = Endpoint("records", subjects.rpc("n2", "agent", "records"), records)
    async with MemoryBus(made.server, "n2").serve(ServiceInfo("n2", "1.0.0", "a test", {}), [one]):
        yield asked


@played(nodes=2)
async def test_a_host_that_lists_vms_without_end_delays_no_create(made: World) -> None:
    await make(made)
    async with endless(made) as asked:
        assert (await vm(made, 1, "data")).uid == uid(1)
    assert len(asked) == PAGES


@played(nodes=2)
async def test_a_host_that_lists_vms_slowly_counts_as_silent(made: World) -> None:
    await make(made)
    async with endless(made, delay_s=1.0) as asked:
        assert (await refused(vm(made, 1, "data"))).reason == "volumes_unheard"
    assert ALL_S <= len(asked) <= ALL_S + 1


@pytest.mark.parametrize(("delay_s", "why"), [(0.0, "more than"), (1.0, "too long")])
def test_a_rebuild_leaves_out_a_host_that_lists_vms_without_end(delay_s: float, why: str) -> None:
    @played(nodes=2)
    async def body(made: World) -> None:
        async with endless(made, delay_s=delay_s):
            client = made.client
            ask = subjects.api("bus", "rebuild")
            answer = await client.request(ask, {"dry_run": True}, timeout_s=30)
        told = {one["node"]: one.get("message", "") for one in answer["nodes"]}
        assert why in told["n2"]
        assert why not in told["n1"]

    body()
