"""Three hosts and three servers: every accepted change is completed despite kills (I1-I8).

`make hosts-test` does 100 creates and 100 deletes; `make test` does fewer.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.chaos.lives import Wanted, as_wanted, insist, until_shown
from tests.hosts import pace
from tests.hosts.fleet import LEAST_MEMORY, Fleet, fleet
from tests.hosts.killer import killing

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.ids import uuid7

VMS = int(os.environ.get("VMS", "12"))
SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
ALIVE = 6
"""VMs at once: without KVM each boots on a core of its own."""
END_S = 150.0
"""Limit for a create or a delete, kills included, on a machine without other load."""

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600 + 60 * VMS)]


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    pace.slowness()  # before we make it slow ourselves
    with fleet(hosts=3, servers=3) as made:
        yield made


async def one_life(bus: NatsBus, number: int) -> str:
    """Create a VM, see it run, delete it, see it gone; return its node."""
    uid = uuid7()
    within_s = END_S * pace.slowness()
    spec = {"uid": uid, "name": f"vm-{number}", "image": "tiny", "memory": LEAST_MEMORY}
    await insist(bus, "create", spec, within_s=within_s)
    shown = await until_shown(
        bus, uid, lambda seen: as_wanted(seen, Wanted.RUNNING), within_s=within_s
    )
    await insist(bus, "delete", {"uid": uid, "grace_s": 0}, within_s=within_s)
    await until_shown(bus, uid, lambda seen: seen is None, within_s=within_s)
    assert shown is not None
    return str(shown["node"])


async def lives(platform: Fleet) -> Counter[str]:
    """Run VMS lives, ALIVE at once, and more until each node had one; return the count per node."""
    free = asyncio.Semaphore(ALIVE)
    ran: Counter[str] = Counter()
    numbers = itertools.count()

    async def live(bus: NatsBus, number: int) -> None:
        async with free:
            ran[await one_life(bus, number)] += 1

    async with platform.bus() as bus:
        due = VMS
        while due:
            async with asyncio.TaskGroup() as group:
                for number in itertools.islice(numbers, due):
                    group.create_task(live(bus, number))
            due = 0 if set(ran) == set(platform.hosts) else ALIVE  # one was down all the time
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
    assert ran.total() >= VMS
    assert not any(host.emulators() for host in platform.hosts.values())
    slow = f"slowness {pace.slowness():.1f}"
    sys.stderr.write(f"{ran.total()} VMs in {took_s:.0f} s, {slow}: {dict(ran)}; audit empty\n")
