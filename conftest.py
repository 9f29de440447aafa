"""For every test of the workspace: how long it may take, and in which order the kinds run."""

import subprocess
from pathlib import Path
from subprocess import DEVNULL

import pytest
from hypothesis import settings

settings.register_profile("virtbus", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("virtbus")

KINDS = {"integration": 60, "e2e": 300, "kubernetes": 300}
"""Marker → seconds, in the order in which they run; anything else has the 20 s of pyproject.toml.

Kubernetes comes last: its tests share an API server, which must not take CPU from the others."""
K8S_BUILD = Path(__file__).parent / "tools" / "k8s" / "build"
NOT_RUN = pytest.StashKey[int]()
"""How many tests of Kubernetes were left out, because its programs are not there."""


@pytest.hookimpl(trylast=True)  # of those that -m and -k left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each kind its time-out, unless the test names its own, and sort the kinds."""
    rank = {}
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if kinds and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(KINDS[kinds[-1]]))
        rank[item] = list(KINDS).index(kinds[-1]) + 1 if kinds else 0
    items.sort(key=rank.__getitem__)
    kubernetes = [item for item in items if item.get_closest_marker("kubernetes")]
    where = (K8S_BUILD, "--where")  # exits with 1 if they are not built
    if kubernetes and subprocess.run(where, stdout=DEVNULL, check=False).returncode:  # noqa: S603
        config.stash[NOT_RUN] = len(kubernetes)
        config.hook.pytest_deselected(items=kubernetes)
        items[:] = [item for item in items if item not in kubernetes]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was left out."""
    left_out = terminalreporter.config.stash.get(NOT_RUN, 0)
    if left_out:
        said = f"{left_out} tests of Kubernetes did NOT run: no programs; run: make k8s-tools"
        terminalreporter.write_sep("!", said, red=True, bold=True)
