"""Sets time-outs, order and lanes of every test of the workspace."""

import gc
import re
import signal
import subprocess
from functools import cache
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("virtbus", deadline=None)  # a busy machine is no defect of the code
settings.load_profile("virtbus")

KINDS = {"integration": 60, "e2e": 300, "kubernetes": 300}
"""Marker → seconds, in the order in which they run; others have the 20 s of pyproject.toml.

Kubernetes comes last: its tests share an API server, which takes CPU from the tests after them.
"""
HOST = "host"
K8S_BUILD = Path(__file__).parent / "tools" / "k8s" / "build"
NOT_RUN = pytest.StashKey[int]()
"""The number of skipped Kubernetes tests, because the programs are not built."""


class Lanes(LoadScopeScheduling):
    """Tests with real servers or guests run in one of several workers, the rest in any."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid.partition("::")[0])


@cache
def lane_of(path: str) -> str:
    """Run tests of one lane in one worker, in their order.

    One lane has the tests that take the host's census, would appear in one, or have short times.
    A file's lane follows from the marks in it, because a scheduler knows nothing else.
    """
    if path.startswith("tests/kubernetes/"):
        return "kubernetes"  # they share an API server
    text = (Path(__file__).parent / path).read_text(encoding="utf-8")
    return HOST if re.search(r"\bmark\.(integration|e2e)\b", text) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Called only with `--dist`; each worker has a network namespace of its own (Makefile)."""
    return Lanes(config, log)


def pytest_configure() -> None:
    """React to SIGINT even if started with it ignored, as a shell script starts `make test &`.

    Every child inherits an ignored signal, but not a handled one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of those that -m and -k selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each kind its time-out, unless the test names its own, and sort the kinds."""
    rank = {}
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if kinds and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(KINDS[kinds[-1]]))
        rank[item] = list(KINDS).index(kinds[-1]) + 1 if kinds else 0
    items.sort(key=rank.__getitem__)
    if hasattr(config, "workerinput"):
        # The longest lane first. In it guests come first, because their tests tolerate the other
        # lanes' load; tests with short times come when those are done.
        lanes = {item: lane_of(item.nodeid.partition("::")[0]) for item in items}
        items.sort(key=lambda item: lanes[item] == HOST and not item.get_closest_marker("e2e"))
        items.sort(key=lambda item: lanes[item] != HOST)
    kubernetes = [item for item in items if item.get_closest_marker("kubernetes")]
    where = (K8S_BUILD, "--where")  # exits with 1 if they are not built
    if kubernetes and subprocess.run(where, stdout=DEVNULL, check=False).returncode:  # noqa: S603
        config.stash[NOT_RUN] = len(kubernetes)
        config.hook.pytest_deselected(items=kubernetes)
        items[:] = [item for item in items if item not in kubernetes]


def pytest_collection_finish() -> None:
    """Freeze the objects from before the first test, so that no later collection scans them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    """Report open resources of a test with real servers at its end, not in a later test."""
    result = yield
    if any(item.get_closest_marker(kind) for kind in KINDS):
        gc.collect()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker reports its skipped tests."""
    config: Any = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_run"] = config.stash.get(NOT_RUN, 0)


def pytest_testnodedown(node: Any) -> None:
    """Receive a worker's report; a crashed worker sends none."""
    said = getattr(node, "workeroutput", {}).get("not_run", 0)
    node.config.stash[NOT_RUN] = max(said, node.config.stash.get(NOT_RUN, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skipped tests clearly."""
    left_out = terminalreporter.config.stash.get(NOT_RUN, 0)
    if left_out:
        said = f"{left_out} tests of Kubernetes did NOT run: no programs; run: make k8s-tools"
        terminalreporter.write_sep("!", said, red=True, bold=True)
