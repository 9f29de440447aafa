"""A service that is down for a while: others continue, and waiting work is done afterwards."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from tests.e2e import host
from tests.e2e.platform import HALT, Json, Platform, address, until

from virtbus.bus.ids import uuid7

pytestmark = pytest.mark.e2e

CREATES = 10
AWAY_S = 60.0
GONE_S = 20.0


def _list_times_s(platform: Platform, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.monotonic()
        platform.ask("vm.list", {"limit": 500})
        times.append(time.monotonic() - begun)
    return times


@contextmanager
def stopped(platform: Platform) -> Iterator[None]:
    """netd hangs: its process exists but does nothing."""
    pid = platform.kill("netd", signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def missing(platform: Platform) -> Iterator[None]:
    """netd is dead, and its supervisor is stopped."""
    os.kill(platform.up.pid, signal.SIGSTOP)
    try:
        platform.kill("netd")
        yield
    finally:
        os.kill(platform.up.pid, signal.SIGCONT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("outage", "away_s"), [(stopped, AWAY_S), (missing, GONE_S)])
def test_ten_creates_wait_for_netd_and_all_run_once_it_is_back(
    patient: Platform, outage: Callable[[Platform], AbstractContextManager[None]], away_s: float
) -> None:
    usual_s = statistics.median(_list_times_s(patient, 20))
    away = patient.pid("netd")
    with outage(patient):
        begun = time.monotonic()
        for number in range(CREATES):
            uid = uuid7()
            patient.uids.add(uid)
            data: Json = {"uid": uid, "name": f"vm-{number}", "image": HALT, "memory": "128MiB"}
            assert patient.ask("vm.create", data)["vm"]["uid"] == uid
        slow_s = 0.0
        while time.monotonic() - begun < away_s:
            slow_s = max(slow_s, statistics.median(_list_times_s(patient, 10)))
            time.sleep(1)
        waiting = patient.vms()
    assert slow_s < max(2.5 * usual_s, 0.1), f"vm list took {slow_s:.3f} s, usually {usual_s:.3f}"
    assert {vm["state"] for vm in waiting} <= {"Preparing", "Scheduled", "Starting", "Failed"}
    assert all("netd" in vm["message"] for vm in waiting), waiting
    if outage is missing:
        until(lambda: patient.pids().get("netd") not in {None, away}, "netd again")
    until(
        lambda: [vm["state"] for vm in patient.vms()] == ["Running"] * CREATES,
        "all run",
        within_s=150,
    )
    views = patient.vms()
    assert len({address(view) for view in views}) == CREATES
    assert all(len(host.qemu_pids(view["uid"])) == 1 for view in views)


@pytest.mark.parametrize("service", ["controller", "imaged", "nodeagent", "nats-server"])
def test_a_service_that_hung_for_a_while_continues(patient: Platform, service: str) -> None:
    view = patient.create("there", "--image", HALT, wait="running")
    pid = patient.kill(service, signal.SIGSTOP)
    try:
        time.sleep(10)  # longer than every request's deadline, shorter than a node's heartbeat TTL
    finally:
        os.kill(pid, signal.SIGCONT)
    patient.wait_whole()
    assert patient.pid(service) == pid
    assert patient.get("there")["state"] == "Running"
    assert len(host.qemu_pids(view["uid"])) == 1
    patient.create("next", "--image", HALT, wait="running")
