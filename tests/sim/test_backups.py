"""Backups and schedules under the faults of a seed (ADR 0068)."""

from collections.abc import Iterable

import pytest
from tests.sim.run import OF_BACKUPS, run

from virtbus.controller.edge import backup_schedule_runs
from virtbus.schemas.backup import HeldBackup

FOUND = {
    2: "a user verifies an old backup: the newest verified one is another",
    14: "an agent asked for a restore again whose end was stored without an answer",
    18: "the clock of a node was set back, and each new backup was removed",
    31: "a repeated request replaced the files that QEMU was writing",
    45: "a VM that was created halted started while its disks were copied",
    105: "an event was taken for the answer to a start",
}
"""Seeds that failed once, and what they found."""
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_of_backups_that_failed_once_is_clean(seed: int) -> None:
    assert run(seed, plan=OF_BACKUPS).violations == []


def test_seeds_contain_all_that_is_done_with_backups() -> None:
    lines = [line for seed in (1, 3) for line in run(seed, plan=OF_BACKUPS, keep_all=True).lines]
    for what in ("backup checked", "backup removed", "$KV.vm._bsched.", "volume filled"):
        assert any(what in line for line in lines), what
    made = [line.split() for line in lines if " backup 01" in line]
    assert any(len(words) == 7 for words in made), "an increment, which names its parent"


@pytest.mark.timeout(120)
def test_a_retention_that_removes_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(held: Iterable[HeldBackup], schedule: str, namespace: str, keep: int) -> list[str]:
        del namespace, keep
        own = [one.id for one in held if one.manifest and one.manifest.schedule == schedule]
        return own[::-1]

    monkeypatch.setattr(backup_schedule_runs, "unneeded", too_much)
    found = (one for seed in range(1, 9) for one in run(seed, plan=OF_BACKUPS).violations)
    assert any(one.startswith("I2") for one in found)
