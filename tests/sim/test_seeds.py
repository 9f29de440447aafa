"""Many seeds, and the seeds that failed once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.run import run

ROOT = Path(__file__).parents[2]
FIRST, SEEDS, SOME = 1000, 200, 40
"""`make test` runs SOME of the SEEDS from FIRST on, `make long` all."""
pytestmark = pytest.mark.timeout(120)


def once_failing() -> list[int]:
    """Return the seeds of seeds.txt that the next test does not run."""
    lines = Path(__file__).with_name("seeds.txt").read_text(encoding="utf-8").splitlines()
    seeds = [int(line.split()[0]) for line in lines if line and not line.startswith("#")]
    return [seed for seed in seeds if seed not in range(FIRST, FIRST + SOME)]


@pytest.mark.parametrize("seed", once_failing())
def test_a_seed_that_failed_once_is_clean(seed: int) -> None:
    assert run(seed).violations == []


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SOME))
def test_a_seed_is_clean(seed: int) -> None:
    assert run(seed).violations == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_seeds_are_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--seeds", str(SEEDS), "--first", str(FIRST)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    code = "from tests.sim.run import run; print(run(3).trace_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(hashes) == 1
