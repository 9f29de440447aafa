"""A short run of the whole load: bounds that hold at any size, as ratios and counts."""

import pytest
from tests.load import phases
from tests.load.__main__ import KIB_PER_VM, say
from tests.load.floor import BARE, floor
from tests.load.world import Shape, bus_of, world

# Later than all deadlines within: those of five phases, and of the work before and after them.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

SHAPE = Shape(vms=200, nodes=10, in_flight=32, churn_s=4.0, phase_s=60.0)
FLOOR_CREATES = 400
MOST_CLAIMS = 8
"""Deletes that the killed controller had in progress: the sweep ends their claims."""
OF_FLOOR = 0.1
"""The long run reaches 0.4; here both take only a second, next to other tests."""
MESSAGES = 30
"""Messages that clients and services send for a create (19 when this was written).

They are eleven for the API and its writes, the node's own requests and answers, events, and each
answer to a write.
"""


async def bare_creates() -> float:
    """Return the creates per second of the floor, on a bus of its own."""
    async with bus_of(SHAPE) as (servers, _, _):
        return await floor(servers, FLOOR_CREATES, SHAPE.in_flight, BARE)


async def test_vms_on_simulated_nodes_are_created_and_deleted() -> None:
    """Two lots of creates, a killed controller under churn, all deleted; nothing is left.

    The controller's cost of a create does not grow with the number of VMs.
    """
    before = await bare_creates()
    async with world(SHAPE) as here:
        await phases.creates(here, 20, say)  # warm
        first = await phases.creates(here, SHAPE.vms // 4, say)
        second = await phases.creates(here, SHAPE.vms - SHAPE.vms // 4, say)
        churned = await phases.churn(here, say)
        gone = await phases.deletes(here, say)
        records, claims = await here.left()
        assert (records, claims <= MOST_CLAIMS) == (0, True)
        assert [line for one in here.services for line in one.complaints()] == []
    bare = min(before, await bare_creates())  # other tests may begin or end meanwhile
    told = f"{first}\n{second}\n{churned}\n{gone}\nfloor {bare}"
    assert second["accepted_per_s"] >= OF_FLOOR * bare, told
    assert second["cpu_ms_per_vm"]["controller"] <= 2 * first["cpu_ms_per_vm"]["controller"], told
    assert second["pss_kib_per_vm"]["controller"] <= 4 * KIB_PER_VM, (
        told
    )  # short, so its noise is large
    assert second["bus_per_vm"]["in_msgs"] <= MESSAGES, told
    assert churned["replaced"] > 0, told
    assert gone["vms"] == 20 + SHAPE.vms, told
