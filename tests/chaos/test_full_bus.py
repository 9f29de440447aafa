"""A full disk of the bus: clients get an error, deletes work, and free space repairs it (F16)."""

import itertools
import json
from collections.abc import Callable

import pytest
from tests.chaos.simulated import MIB, Ballast, Simulated, simulated
from tests.e2e.platform import until

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.e2e

DISK_BYTES = 48 * MIB
SWEEPS = {"VIRTBUS_SWEEP_INTERVAL_S": "2", "VIRTBUS_ORPHAN_GRACE_S": "2"}
"""A create that stalls between claim and commit leaves the claim to the sweep (ADR 0003)."""


def _refusal(act: Callable[[], object]) -> str:
    """Return the reason of a refusal; empty if there was none."""
    try:
        act()
    except VirtbusError as refused:
        return refused.reason
    except BusError as error:
        return str(error)
    return ""


def _alarms(platform: Simulated) -> str:
    return str(json.loads(platform.try_cli("status", "-o", "json").stdout)["alarms"])


def _create(platform: Simulated, name: str) -> Callable[[], object]:
    return lambda: platform.ask("vm.create", {"name": name, "image": "tiny", "uid": uuid7()})


@pytest.mark.timeout(180)
def test_a_full_disk_of_the_bus_is_reported_and_recovers_without_an_operator() -> None:
    platform = Simulated(SWEEPS)
    store = platform.state_dir / "nats"
    platform.own_disk(store, DISK_BYTES)
    ballast = Ballast(store)
    with simulated(platform):
        for name in ("one", "two", "three"):
            platform.create(name)
        until(lambda: (store / "reserve").exists(), "the reserve is there")
        pids = {name: pid for name, pid in platform.pids().items() if name != "nats-server"}

        ballast.fill()
        # The first write that finds no space stalls the server, and its request gets no answer. The
        # delete below must not be this request. The reserve is used only after the stall.
        until(lambda: not (store / "reserve").exists(), "the reserve is used")
        until(lambda: _refusal(_create(platform, "four")) == "bus_full", "creates are refused")
        platform.delete("one")  # it still fits
        until(lambda: "free" in _alarms(platform), "an alarm")

        ballast.fill()
        powers = itertools.cycle(["vm.stop", "vm.start"])
        until(
            lambda: _refusal(lambda: platform.ask(next(powers), {"name": "two"})) == "bus_storage",
            "writes are refused with their cause",
        )
        assert "stores nothing" in _alarms(platform)
        assert platform.get("three")["state"] == "Running"
        until(
            lambda: "nats-server stores nothing" in platform.log.read_text(),
            "one try where the reserve helped",
        )

        ballast.free()
        until(lambda: _refusal(_create(platform, "five")) == "", "creates work again")
        platform.wait_state("five", "Running")
        until(lambda: (store / "reserve").exists(), "the reserve is taken again")
        until(lambda: "free" not in _alarms(platform), "no alarm any more")
        now = {name: pid for name, pid in platform.pids().items() if name != "nats-server"}
        assert now == pids, "only the server was started again"
        platform.delete("two", "three", "five")
        platform.wait_no_keys()
