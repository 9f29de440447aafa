"""kill -9 of each service: guests continue, the service returns to the same state (F1-F4, F13)."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.chaos.lives import insist
from tests.e2e import host
from tests.e2e.platform import HALT, Json, Platform, address, until

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.e2e

SERVICES = ("controller", "imaged", "netd", "nodeagent", "nats-server", "up")
CREATE_STEPS = {
    "vm.accepted": {"controller", "imaged", "nats-server"},
    "image.ready": {"imaged", "nodeagent"},
    "network.ready": {"netd", "nodeagent"},
    "domain.defined": {"nodeagent", "nats-server"},
    "domain.started": {"nodeagent", "controller"},
}
DELETE_STEPS = {
    "vm.deleting": {"controller", "nodeagent", "nats-server"},
    "domain.stopped": {"nodeagent", "netd"},
    "network.released": {"netd", "nodeagent"},
    "disks.released": {"imaged", "nodeagent"},
}
"""Steps of a VM, and the services that work before or after each."""


def kills(steps: dict[str, set[str]]) -> list[Any]:
    """Each service at each step. Kills of a service that has no work at the step are long."""
    return [
        pytest.param(step, name, marks=() if name in working else pytest.mark.long)
        for step, working in steps.items()
        for name in SERVICES
    ]


@pytest.mark.timeout(480)
def test_guests_continue_when_a_service_is_killed_and_it_returns(patient: Platform) -> None:
    views = [patient.create(name, wait="") for name in ("one", "two")]
    views = patient.wait_ready("one", "two")
    before = {view["uid"]: host.qemu_pids(view["uid"]) for view in views}
    for service in SERVICES:
        with answering(address(views[0])) as missed:
            patient.wait_back(service, patient.kill(service))
        assert missed() <= 3, f"pings that stayed without an answer while {service} was away"
        after = {view["uid"]: view for view in patient.vms()}
        for view in views:
            same = after[view["uid"]]
            assert host.qemu_pids(view["uid"]) == before[view["uid"]], f"{service}: one emulator"
            for field in ("state", "node", "epoch", "generation", "restarts", "interfaces"):
                assert same[field] == view[field], (service, field)
        patient.create("next", "--image", HALT, wait="running")
        patient.delete("next")
    patient.delete("one")  # the new netd renews the DHCP lease of the address
    patient.cli("vm", "stop", "two", "--grace", "0")
    patient.cli("vm", "start", "two")
    again = patient.wait_ready("two")[0]
    assert address(again) == address(views[1])


@contextmanager
def answering(target: str) -> Iterator["Missed"]:
    """Pings `target` five times a second until the context ends."""
    missed = Missed(target)
    missed.start()
    try:
        yield missed
    finally:
        missed.over.set()
        missed.join()


class Missed(threading.Thread):
    """Count the pings without an answer; call it for the number."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._count = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self._count += not host.ping(self._target, wait_s=0)

    def __call__(self) -> int:
        return self._count


def _kill_at(patient: Platform, service: str, uid: str, step: str, begin: Json, verb: str) -> int:
    """Request `vm.<verb>`, kill the service at the event `step`, and return the dead pid.

    The request is repeated with the same id while its outcome is unknown.
    """
    pid = patient.pid(service)

    async def strike() -> None:
        async with (
            patient.bus() as bus,
            bus.subscribe(subjects.events(uid)) as facts,
            asyncio.timeout(60),
        ):
            asked = asyncio.Event()

            async def ask() -> None:
                await insist(bus, verb, begin)
                asked.set()

            async with asyncio.TaskGroup() as group:
                group.create_task(ask())
                async for fact in facts:
                    if fact.subject.endswith(f".{step}"):
                        os.kill(pid, signal.SIGKILL)
                        break
                    assert not fact.subject.endswith("failed"), open_envelope(fact.body).data
                if service == "up":  # its server ended with it
                    await asyncio.to_thread(patient.wait_back, service, pid)
                await asked.wait()

    asyncio.run(strike())
    return pid


def _new(uid: str, name: str) -> Json:
    return {"uid": uid, "name": name, "image": HALT, "memory": "128MiB"}


@pytest.mark.parametrize(("step", "service"), kills(CREATE_STEPS))
def test_create_ends_running_when_a_service_is_killed_at_a_step(
    patient: Platform, step: str, service: str
) -> None:
    uid = uuid7()
    patient.uids.add(uid)
    dead = _kill_at(patient, service, uid, step, _new(uid, "struck"), "create")
    view = patient.wait_state("struck", "Running", within_s=60)
    if service != "up":
        patient.wait_back(service, dead)
    assert view["uid"] == uid
    assert len(host.qemu_pids(uid)) == 1
    assert [vm["uid"] for vm in patient.vms()] == [uid]
    patient.create("next", "--image", HALT, wait="running")


@pytest.mark.parametrize(("step", "service"), kills(DELETE_STEPS))
def test_delete_ends_with_nothing_left_when_a_service_is_killed_at_a_step(
    patient: Platform, step: str, service: str
) -> None:
    uid = patient.create("struck", "--image", HALT, wait="running")["uid"]
    dead = _kill_at(patient, service, uid, step, {"uid": uid, "grace_s": 0}, "delete")
    until(lambda: _gone(patient, "struck"), "the VM is gone", within_s=60)
    if service != "up":
        patient.wait_back(service, dead)
    patient.wait_quiet()
    patient.create("struck", "--image", HALT, wait="running")


def _gone(patient: Platform, name: str) -> bool:
    try:
        return name not in {vm["name"] for vm in patient.vms()}
    except (BusError, VirtbusError):
        return False
