"""Fixtures of every test that boots guests; `tests/chaos` uses them too."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import Platform, Stage

STAGE = Stage()
_KEEP = "VIRTBUS_E2E_KEEP"
"""Names a directory for the logs of platforms whose test failed."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Tell fixtures whether the test itself failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.stash[FAILED] = report.failed


FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def _stage() -> Iterator[None]:
    host.refuse_the_machines_own_network()
    yield
    STAGE.end()


@pytest.hookimpl(trylast=True)  # what the test itself used is gone
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the shared platform where no test follows that boots guests."""
    if nextitem is None or not nextitem.get_closest_marker("e2e"):
        STAGE.end()


@pytest.fixture
def stage() -> Stage:
    """The stage itself, for platforms with other settings."""
    return STAGE


@pytest.fixture
def patient(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """The shared platform, which tests may break; after each test it is whole and has no VM."""
    held = STAGE.get()
    yield held
    end_whole(held, request.node.name)
    drop_if_failed(held, request.node)


def end_whole(held: Platform, name: str) -> None:
    """Delete all VMs and wait until nothing of them is left; a platform that fails this ends."""
    try:
        held.nothing_left()
    except BaseException:
        _keep_log(held, name)
        STAGE.drop()
        raise


def drop_if_failed(held: Platform, test: pytest.Item) -> None:
    """End the platform after a test that failed: its state is unknown."""
    if test.stash.get(FAILED, False):
        _keep_log(held, test.name)
        STAGE.drop()


@pytest.fixture
def platform(patient: Platform) -> Iterator[Platform]:
    """The shared platform; each of its services survives the test."""
    pids = patient.pids()
    yield patient
    assert patient.pids() == pids, "a service ended in a test that did not end it"


def _keep_log(held: Platform, name: str) -> None:
    folder = os.environ.get(_KEEP)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(held.log, Path(folder, f"{name.replace('/', '_')}.log"))
