"""Three hosts and three servers: all that was accepted reaches its end, whatever is killed (I1-I8).

`make hosts-test` does 100 creates and 100 deletes; within `make test` they are fewer.
"""

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.platform import Json
from tests.hosts.fleet import Fleet, fleet
from tests.hosts.killer import killing

from virtbus.bus.ids import uuid7
from virtbus.bus.natsbus import NatsBus
from virtbus.bus.ports import BusError
from virtbus.schemas.errors import Retry, VirtbusError

VMS = int(os.environ.get("VMS", "12"))
SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
ALIVE = 6
"""VMs at once: without KVM each boots on a core of its own."""
END_S = 150.0
"""Within this a create runs, and a delete is gone, blows included."""

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(240 + 8 * VMS)]


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=3, servers=3) as made:
        yield made


async def insist(bus: NatsBus, verb: str, data: Json) -> Any:
    """The answer to a request that is repeated, with the same id, while its end is open."""
    async with asyncio.timeout(END_S):
        while True:
            try:
                return await bus.request(f"virtbus.api.v1.vm.{verb}", data, timeout_s=5)
            except VirtbusError as error:
                if error.body.retry is Retry.NEVER:
                    raise
            except BusError:
                pass
            await asyncio.sleep(0.2)


async def view(bus: NatsBus, uid: str) -> Json | None:
    """The VM as it is shown; None when it is gone."""
    try:
        found: Json = await insist(bus, "get", {"uid": uid})
    except VirtbusError as error:
        if error.code == 404:
            return None
        raise
    return found


async def until_shown(bus: NatsBus, uid: str, right: Callable[[Json | None], bool]) -> Json | None:
    seen: list[Json | None] = []
    try:
        async with asyncio.timeout(END_S):
            while True:
                seen.append(await view(bus, uid))
                if right(seen[-1]):
                    return seen[-1]
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(f"{uid} stays {seen[-1:]}") from None


async def one_life(bus: NatsBus, number: int) -> str:
    """Create a VM, see it run, delete it, see it gone; the node that it ran on."""
    uid = uuid7()
    spec = {"uid": uid, "name": f"vm-{number}", "image": "tiny", "memory": "64MiB"}
    await insist(bus, "create", spec)
    shown = await until_shown(
        bus, uid, lambda seen: seen is not None and seen["state"] == "Running"
    )
    await insist(bus, "delete", {"uid": uid, "grace_s": 0})
    await until_shown(bus, uid, lambda seen: seen is None)
    assert shown is not None
    return str(shown["node"])


async def lives(platform: Fleet) -> Counter[str]:
    """VMS lives, ALIVE at once; how many ran on each node."""
    free = asyncio.Semaphore(ALIVE)
    ran: Counter[str] = Counter()

    async def live(bus: NatsBus, number: int) -> None:
        async with free:
            ran[await one_life(bus, number)] += 1

    async with platform.bus() as bus, asyncio.TaskGroup() as group:
        for number in range(VMS):
            group.create_task(live(bus, number))
    return ran


def test_every_create_and_delete_ends_while_processes_and_servers_are_killed(
    platform: Fleet,
) -> None:
    begun = time.monotonic()
    with killing(platform, SEED) as killer:
        try:
            ran = asyncio.run(lives(platform))
        finally:
            told = "; ".join(killer.blows)
            sys.stderr.write(f"\nseed {SEED}: {len(killer.blows)} blows: {told}\n")
    took_s = time.monotonic() - begun
    platform.wait_whole()
    platform.nothing_left()
    assert ran.total() == VMS
    assert set(ran) == set(platform.hosts), ran
    assert not any(host.emulators() for host in platform.hosts.values())
    sys.stderr.write(f"{VMS} VMs in {took_s:.0f} s: {dict(ran)}; audit empty\n")
