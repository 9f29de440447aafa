"""A small storm: real guests, all created and all started at once, and removed again."""

import asyncio
import time

import pytest
from tests.bench.stage import Stage
from tests.census import diff
from tests.e2e import host
from tests.e2e.stage import STAGE
from tests.load.crowd import Crowd
from tests.load.storm import MEMORY_MIB, platform, storm

GUESTS = 6
LEFT_S = 30

pytestmark = pytest.mark.e2e


async def test_all_guests_of_a_storm_run_and_leave_nothing() -> None:
    """Each is reported Running, Stopped and gone; `make storm` measures the speed."""
    host.refuse_the_machines_own_network()
    STAGE.end()  # two platforms in one namespace would share bridge and filters
    async with platform(GUESTS, VIRTBUS_BRIDGE_LINGER_S="0.2") as here:
        before = _census(here)
        crowd = Crowd(here, GUESTS, MEMORY_MIB)
        await crowd.create()
        assert [len(host.qemu_pids(uid)) for uid in crowd.uids] == [1] * GUESTS
        await crowd.stop()
        assert [len(host.qemu_pids(uid)) for uid in crowd.uids] == [0] * GUESTS
        await crowd.start()
        assert [len(host.qemu_pids(uid)) for uid in crowd.uids] == [1] * GUESTS
        await crowd.delete()
        taken = await storm(here, GUESTS, rounds=1)
        assert min(*taken.creates, *taken.plain, *taken.starts) > 0
        ends_s = time.monotonic() + LEFT_S
        while (left := diff(before, _census(here))) and time.monotonic() < ends_s:
            await asyncio.sleep(0.1)
        assert left == []


def _census(here: Stage) -> list[str]:
    return host.take_census(here.folder / "state", here.folder / "run", here.watch.expected)
