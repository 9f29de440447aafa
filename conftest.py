"""Sets time-outs, order and lanes of every test of the workspace."""

import gc
import signal
import subprocess
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("virtbus", deadline=None)  # a busy machine is no defect of the code
settings.load_profile("virtbus")

KINDS = {"integration": 120, "e2e": 300, "kubernetes": 300}
"""Marker → seconds of its time-out; anything else has those of pyproject.toml."""
LONGEST_FIRST = ("kubernetes", "e2e", "integration")
"""The order in which workers take tests: the short ones at the end fill up what is left."""
LAST = "tests/sim/test_seeds.py"
"""Its tests are lanes of two seconds each: no worker is left with a whole file at the end."""
CLUSTER = ("tests/kubernetes/", "tests/e2e/test_kubernetes.py")
"""The tests that share an API server."""
ONE_GUEST = "tests/e2e/test_one_guest.py"
"""Its tests share a guest."""
BUSY = ("kubernetes", "tests/e2e/", "tests/chaos/", "images/")
"""The lanes whose tests run guests or a cluster."""
K8S_BUILD = Path(__file__).parent / "tools" / "k8s" / "build"
FOLDERS = pytest.StashKey[list[str]]()
"""The collected paths in their original order, which decides the order of the tests."""
YOUNG_OBJECTS = 50_000
"""Objects between two collections of garbage. With Python's 700, a seed costs an eighth more."""
NOT_RUN = pytest.StashKey[int]()
"""The number of skipped Kubernetes tests, because the programs are not built."""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their parameter: each worker would name random or timed ones differently."""
    return argname if isinstance(val, bytes) else None


class Lanes(LoadScopeScheduling):
    """Several workers, each on a host of its own: tests of one lane run in one of them.

    The last worker begins with the lanes without guests. Guests use all of the CPU, and most other
    tests wait. Side by side, they keep the processors busy.
    """

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if node is self.nodes[-1]:
            quiet = (lane for lane in self.workqueue if not lane.startswith(BUSY))
            self.workqueue.move_to_end(next(quiet, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


def lane_of(nodeid: str) -> str:
    """A lane is a file, but for those that share an API server, or one platform in each worker.

    Each seed of the simulation is one as well: they share nothing, and together take minutes.
    """
    path = nodeid.partition("::")[0]
    if path == LAST:
        return nodeid
    if path.startswith(CLUSTER):
        return "kubernetes"
    if path != ONE_GUEST and path.startswith(("tests/chaos/", "tests/e2e/")):
        return nodeid.partition("[")[0]
    return path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Called only with `--dist`; each worker has a host of its own (Makefile)."""
    return Lanes(config, log)


def pytest_configure(config: Any) -> None:
    """React to SIGINT even if started with it ignored, as a shell script starts `make test &`.

    Every child inherits an ignored signal, but not a handled one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[FOLDERS] = list(config.args)
    _rotate_folders(config)
    gc.disable()  # until all tests are collected, which makes no garbage


def _rotate_folders(config: Any) -> None:
    """Let each worker collect another part of the folders first.

    pytest compiles a test module when it collects it, and keeps the result on disk. All workers
    collect all modules. In one common order, each of them would compile every module.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        number = int(worker["workerid"].removeprefix("gw"))
        first = number * len(config.args) // worker["workercount"]
        config.args = [*config.args[first:], *config.args[:first]]


@pytest.hookimpl(trylast=True)  # of those that -m and -k selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each kind its time-out, unless the test names its own, and sort the kinds."""
    rank = {}
    folders = config.stash[FOLDERS]
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if kinds and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(KINDS[kinds[-1]]))
        shorter = len(LONGEST_FIRST) + item.nodeid.startswith(LAST)
        folder = next((at for at, one in enumerate(folders) if item.nodeid.startswith(one)), 0)
        rank[item] = (LONGEST_FIRST.index(kinds[-1]) if kinds else shorter, folder)
    items.sort(key=rank.__getitem__)
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
    gc.set_threshold(YOUNG_OBJECTS)
    gc.enable()


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
