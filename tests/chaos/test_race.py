"""Two controllers at once: each name has one winner, and no orphan claim is left (ADR 0003)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.e2e.platform import NODE, Json, Platform, standing, until

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.wire import read

pytestmark = pytest.mark.e2e

ROUNDS = 100
RIVALS = 4
BURST = 12


@pytest.fixture
def second_controller(patient: Platform) -> Iterator[subprocess.Popen[bytes]]:
    """Another controller of the same bus, killed at the end."""
    environ = {
        **patient.environ,
        "VIRTBUS_NODE": NODE,
        "VIRTBUS_CREDS": str(patient.run_dir / "controller.creds"),
        "VIRTBUS_LOG_FORMAT": "json",
    }
    with (patient.base / "second.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "virtbus.controller"], env=environ, stdout=log, stderr=log
        )
    try:
        until(lambda: _controllers(patient) == 2, "both answer")
        yield process
    finally:
        process.kill()
        process.wait()


def _controllers(patient: Platform) -> int:
    return patient.cli("status").count("virtbus-controller")


def _halted(name: str) -> Json:
    """A create of a halted VM: the race is only about its record and name."""
    return {
        "uid": uuid7(),
        "name": name,
        "image": "tiny",
        "spec": {"run_strategy": "Halted"},
    }


async def _try(bus: NatsBus, data: Json) -> str:
    """Return the uid if this create won; the same request again settles an unknown outcome."""
    for _ in range(6):
        with suppress(OutcomeUnknownError, UnavailableError):
            try:
                await bus.request("virtbus.api.v1.vm.create", data, timeout_s=5)
            except VirtbusError as error:
                if error.code != 409:
                    raise
                return ""
            return str(data["uid"])
    raise AssertionError(data)


async def _orphans(patient: Platform) -> tuple[int, list[str]]:
    """Return the number of claims, and the claims whose uid has no record."""
    async with patient.bus("admin") as admin:
        records = await standing(admin, "$KV.vm.>")
    uids = {key.rsplit(".", 1)[1] for key in records if "._name." not in key and "._" not in key}
    claims = {key: read(NameClaim, value) for key, value in records.items() if "._name." in key}
    return len(claims), [key for key, claim in claims.items() if claim.uid not in uids]


async def _only_claims(patient: Platform, count: int) -> None:
    """Wait until there are `count` claims and no orphan: a delete purges the claim last."""
    async with asyncio.timeout(30):
        while await _orphans(patient) != (count, []):
            await asyncio.sleep(0.1)


async def _delete(bus: NatsBus, name: str) -> None:
    """Delete a VM and wait until it is gone: halted VMs also count in a node's capacity."""
    await bus.request("virtbus.api.v1.vm.delete", {"name": name}, timeout_s=30)
    async with asyncio.timeout(30):
        while True:
            page = await bus.request("virtbus.api.v1.vm.list", {}, timeout_s=30)
            if not page.get("items"):
                return
            await asyncio.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("second_controller")
async def test_hundred_races_for_one_name_have_one_winner_each(patient: Platform) -> None:
    async with patient.bus() as one, patient.bus() as two:
        for number in range(ROUNDS):
            name = f"race-{number % 3}"  # names are free again after their VM was deleted
            rivals = [_halted(name) for _ in range(RIVALS)]
            patient.uids.update(rival["uid"] for rival in rivals)
            async with asyncio.TaskGroup() as group:
                tries = [
                    group.create_task(_try(bus, rival))
                    for bus, rival in zip((one, two, one, two), rivals, strict=True)
                ]
            winners = [done.result() for done in tries if done.result()]
            assert len(winners) == 1, f"round {number}: {winners}"
            view = await one.request("virtbus.api.v1.vm.get", {"name": name}, timeout_s=30)
            assert view["uid"] == winners[0]
            if number % 10 == 0:
                await _only_claims(patient, 1)
            await _delete(one, name)
        await _only_claims(patient, 0)


async def test_name_is_free_again_after_a_controller_died_between_claim_and_commit(
    patient: Platform, second_controller: subprocess.Popen[bytes]
) -> None:
    """Kill a controller during a burst of creates; the other can claim every name at once."""
    burst = [_halted(f"burst-{number}") for number in range(BURST)]
    patient.uids.update(data["uid"] for data in burst)
    async with patient.bus() as bus, asyncio.TaskGroup() as group:
        tries = [group.create_task(_try(bus, data)) for data in burst]
        await asyncio.sleep(0)
        os.kill(second_controller.pid, signal.SIGKILL)
        for done in tries:
            assert await done
    async with patient.bus() as bus:
        page = await bus.request("virtbus.api.v1.vm.list", {"limit": 500}, timeout_s=30)
        assert len(page["items"]) == len(burst)
    assert (await _orphans(patient))[1] == []
    assert json.loads(patient.cli("vm", "list", "-o", "json"))["items"]
