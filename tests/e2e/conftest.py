"""Fixtures of tests that boot guests."""

import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path; what tests share is imported from here.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.conflist import cni_network
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
    "cni_network",
    "patient",
    "platform",
    "pytest_runtest_makereport",
    "pytest_runtest_teardown",
    "stage",
]
