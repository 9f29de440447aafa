"""A short run of the whole load: what must hold at any size, told as ratios and counts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.load import phases
from tests.load.__main__ import KIB_PER_VM, STATUSES
from tests.load.floor import floor
from tests.load.world import Shape, bus_of, world

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SHAPE = Shape(vms=200, nodes=10, in_flight=32, churn_s=4.0)
FLOOR_CREATES = 400
OF_FLOOR = 0.1
"""The long run holds 0.4; here both are a second long, beside other tests."""
MESSAGES = 30
"""What clients and services send for a create: eleven for the API and its writes, the node's own
requests and answers, facts, and each answer to a write (19 when this was written)."""


async def test_vms_on_simulated_nodes_come_and_go(
    record_property: Callable[[str, Any], None],
) -> None:
    """Two lots of creates, a killed controller under churn, all deleted; nothing is left.

    What a create costs the controller does not grow with the VMs that are there.
    """
    silent: Callable[[str], None] = partial(record_property, "progress")
    async with world(SHAPE) as here:
        await phases.creates(here, 20, silent)  # warm
        first = await phases.creates(here, SHAPE.vms // 4, silent)
        second = await phases.creates(here, SHAPE.vms - SHAPE.vms // 4, silent)
        churned = await phases.churn(here, silent)
        gone = await phases.deletes(here, silent)
        assert await here.records() == 0
        assert [line for one in here.services for line in one.complaints()] == []
    async with bus_of(SHAPE) as (servers, _, _):
        bare = await floor(servers, FLOOR_CREATES, SHAPE.in_flight, STATUSES)
    record_property("figures", [first, second, churned, gone, bare])
    assert second["accepted_per_s"] >= OF_FLOOR * bare
    assert second["cpu_ms_per_vm"]["controller"] <= 2 * first["cpu_ms_per_vm"]["controller"]
    assert second["pss_kib_per_vm"]["controller"] <= 4 * KIB_PER_VM  # short, so its noise is large
    assert second["bus_per_vm"]["in_msgs"] <= MESSAGES
    assert churned["replaced"] > 0
    assert gone["vms"] == 20 + SHAPE.vms
