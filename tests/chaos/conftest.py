"""Fixtures of tests that boot guests."""

import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path; shared fixtures are imported here.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.stage import (
    _stage,
    patient,
    platform,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    stage,
)

__all__ = [
    "_stage",
    "patient",
    "platform",
    "pytest_runtest_makereport",
    "pytest_runtest_teardown",
    "stage",
]
