"""For every test of the workspace: how long it may take, and in which order the kinds run."""

import pytest
from hypothesis import settings

settings.register_profile("virtbus", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("virtbus")

KINDS = {"integration": 60, "e2e": 300}
"""Marker → seconds, cheap kinds first; anything else has the 20 s of pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each kind its time-out, unless the test names its own, and run the cheap kinds first."""
    rank = {}
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if kinds and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(KINDS[kinds[-1]]))
        rank[item] = list(KINDS).index(kinds[-1]) + 1 if kinds else 0
    items.sort(key=rank.__getitem__)
