"""The real controllers and agents on a simulated cluster, under the faults of a seed."""

import pytest
from tests.sim.run import run
from tests.sim.users import Plan

pytestmark = pytest.mark.timeout(120)


def test_without_faults_no_invariant_is_violated() -> None:
    verdict = run(1, only=frozenset())
    assert verdict.violations == []
    assert verdict.steps > 300


@pytest.mark.parametrize("seed", [1, 4])
def test_the_same_seed_twice_is_the_same_run(seed: int) -> None:
    assert run(seed).trace_hash == run(seed).trace_hash


@pytest.mark.parametrize("seed", [2, 3])
def test_a_vm_keeps_one_meaning_of_its_image_under_faults(seed: int) -> None:
    verdict = run(seed, plan=Plan(image_names=3), keep_all=True)
    assert verdict.violations == []
    assert sum("$KV.vm._img." in line for line in verdict.lines) > 20


@pytest.mark.parametrize("seed", [2, 5])
def test_no_address_is_given_to_two_vms_under_faults(seed: int) -> None:
    verdict = run(seed, plan=Plan(networks=4), keep_all=True)
    assert verdict.violations == []
    assert sum("$KV.vm._addr." in line for line in verdict.lines) > 10


@pytest.mark.parametrize("seed", [2, 5])
def test_no_network_ends_while_a_vm_uses_it_under_faults(seed: int) -> None:
    verdict = run(seed, plan=Plan(networks=3), keep_all=True)
    assert verdict.violations == []
    assert sum("$KV.vm._net." in line for line in verdict.lines) > 10
