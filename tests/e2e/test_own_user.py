"""An imaged of its own user, as under systemd, serves readings and merges of disks.

The tests are those of an imaged that is root.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import Platform, Stage
from tests.e2e.test_live_snapshots import (
    test_a_clone_of_a_running_vm_has_its_disk_and_another_identity as test_a_clone_and_its_merges,
)
from tests.e2e.test_readings import (
    test_a_reader_rebuilds_the_disks_of_a_guest_from_what_was_written as test_readings,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

__all__ = ["test_a_clone_and_its_merges", "test_readings"]
HERE = Path(__file__).parent / "own_user"


@pytest.fixture
def platform(stage: Stage) -> Iterator[Platform]:
    """A platform whose imaged is not root."""
    with stage.apart({"PYTHONPATH": str(HERE)}) as made:
        assert os.stat(f"/proc/{made.pid('imaged')}").st_uid != 0
        yield made
