"""Users export disks under the faults of a seed: each export ends, once."""

import pytest
from tests.sim.run import run
from tests.sim.users import Plan

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_export_ends_once(seed: int) -> None:
    assert run(seed, plan=Plan(exports=True)).violations == []
