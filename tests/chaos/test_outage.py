"""A service that is down for a while: others continue, and waiting work is done afterwards."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
from tests.e2e import host
from tests.e2e.platform import HALT, Json, Platform, address, until

from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects

pytestmark = pytest.mark.e2e

CREATES = 10
AWAY_S = 60.0
GONE_S = 20.0


@dataclass(frozen=True)
class Pace:
    """Medians in seconds. A read of the bus alone takes longer only where the machine is slow."""

    list_s: float
    bus_s: float


def _pace(platform: Platform, count: int) -> Pace:
    async def read() -> None:
        async with platform.bus("admin") as admin:
            await admin.get(subjects.lease("fleet"))

    def median_s(act: Callable[[], object]) -> float:
        times = []
        for _ in range(count):
            begun = time.monotonic()
            act()
            times.append(time.monotonic() - begun)
        return statistics.median(times)

    return Pace(
        list_s=median_s(lambda: platform.ask("vm.list", {"limit": 500})),
        bus_s=median_s(lambda: asyncio.run(read())),
    )


def _is_slow(now: Pace, usual: Pace) -> bool:
    load = max(1.0, now.bus_s / usual.bus_s)
    return now.list_s >= max(2.5 * usual.list_s * load, 0.1)


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
@pytest.mark.parametrize(
    ("outage", "away_s"), [pytest.param(stopped, AWAY_S, marks=pytest.mark.long), (missing, GONE_S)]
)
def test_ten_creates_wait_for_netd_and_all_run_once_it_is_back(
    patient: Platform, outage: Callable[[Platform], AbstractContextManager[None]], away_s: float
) -> None:
    usual = _pace(patient, 20)
    away = patient.pid("netd")
    with outage(patient):
        begun = time.monotonic()
        for number in range(CREATES):
            uid = uuid7()
            patient.uids.add(uid)
            data: Json = {"uid": uid, "name": f"vm-{number}", "image": HALT, "memory": "128MiB"}
            assert patient.ask("vm.create", data)["vm"]["uid"] == uid
        paces = []
        while time.monotonic() - begun < away_s:
            paces.append(_pace(patient, 10))
            time.sleep(1)
        waiting = patient.vms()
    assert not [pace for pace in paces if _is_slow(pace, usual)], f"usually {usual}"
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
