"""A short run of volumes and ended operations: nothing grows with their number, per piece."""

import pytest
from tests.load.objects import run, verdicts
from tests.load.world import Shape

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]


async def test_volumes_and_ended_operations_cost_the_same_at_any_number() -> None:
    found = await run(Shape(vms=0, nodes=3, in_flight=16, phase_s=120.0), 600, 3)
    holds = verdicts(found)
    del holds["CPU per piece"]  # it shares the machine with other tests
    assert all(holds.values()), f"{holds}\n{found}"
