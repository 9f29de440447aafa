"""Kills a controller before or after each of its writes while VMs move (ADR 0014).

At any point: no VM runs twice (I1), none is lost (I2), and no secret is left behind (I5).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_departures import FREE, POWERED_OFF, Site
from services.controller.tests.virtual import World, run, world_on

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import background
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings

Story = Callable[[Site, Callable[[], None]], Awaitable[None]]
WRITES = ("put", "purge", "batch")
LEASE = "$KV.lease."


class MortalBus(MemoryBus):
    """A connection whose process is killed at its write number `at`, before or right after it."""

    def __init__(self, server: MemoryServer, at: int, *, behind: bool) -> None:
        super().__init__(server, "mortal", SOURCES)
        self.armed = False
        self.writes = 0
        self.dead = asyncio.Event()
        self._at = at
        self._behind = behind

    def arm(self) -> None:
        """From now on its writes count."""
        self.armed = True

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in WRITES:
            return found

        async def mortal(*args: Any, **more: Any) -> Any:
            if not self.armed or str(args[0]).startswith(LEASE):
                return await found(*args, **more)
            self.writes += 1
            if self.writes != self._at:
                return await found(*args, **more)
            if self._behind:
                await found(*args, **more)
            self.dead.set()
            return await asyncio.get_running_loop().create_future()

        return mortal


def virtual_ns() -> int:
    """The clock of the bus and the controllers, so that the sweep sees time pass."""
    return int(asyncio.get_running_loop().time() * 1e9)


SOURCES = Sources(time_ns=virtual_ns)


async def _declared() -> None:
    """The fake needs no declaration of its streams."""


async def killed_at(at: int, *, behind: bool, story: Story) -> bool:
    """Play `story`; the first controller dies at its write `at`. Return False if it made fewer."""
    async with world_on(MemoryServer(virtual_ns), controllers=0, nodes=0) as made:
        bus = MortalBus(made.server, at, behind=behind)
        made.controllers["c1"] = ControllerService(bus, Settings(), _declared)
        there = Site(made)
        async with background() as tasks:
            first = tasks.start(made.controllers["c1"].run())
            await asyncio.sleep(1)  # it holds the lease
            bus2 = MemoryBus(made.server, "c2", SOURCES)
            second = ControllerService(
                bus2, Settings(sweep_interval_s=5, orphan_grace_s=5), _declared
            )
            tasks.start(second.run())
            made.controllers = {"c2": second}

            async def bury() -> None:
                await bus.dead.wait()
                bus.disconnect()
                first.cancel()

            tasks.start(bury())
            await asyncio.sleep(1)
            await story(there, bus.arm)
            await asyncio.sleep(30)  # a sweep
            there.well()
            await _nothing_left(made)
        return bus.dead.is_set()


async def _nothing_left(made: World) -> None:
    """Each secret belongs to an existing VM."""
    records = await _standing(made, "$KV.vm.>")
    homes = {key.removeprefix("$KV.vm.") for key in records}
    secrets = {key.removeprefix("$KV.sec.") for key in await _standing(made, "$KV.sec.>")}
    assert {secret for secret in secrets if not secret.startswith("_signing.")} <= homes
    assert len([home for home in homes if home.endswith(uid(1))]) == 1
    assert [secret for secret in secrets if secret.endswith(uid(1))]


async def _standing(made: World, watched: str) -> list[str]:
    found = []
    async with made.host.watch(watched) as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                break
            if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                found.append(item.key)
    return found


async def _create(there: Site, number: int) -> None:
    request = {"name": f"vm{number}", "image": "tiny", "uid": uid(number)}
    await there.made.vm("create", **request, user_data="#cloud-config\n", spec=FREE)
    await there.runs_on(number, "n1")


async def _ask(there: Site, verb: str, **data: str) -> None:
    """Act like a client: repeat a request without an answer."""
    while True:
        try:
            await there.node(verb, "n1", **data)
        except BusError:
            continue
        return


async def _drained(there: Site, arm: Callable[[], None]) -> None:
    async with there.host("n1").on():
        await asyncio.sleep(1)
        for number in (1, 2):
            await _create(there, number)
        async with there.host("n2").on():
            await asyncio.sleep(1)
            arm()
            await _ask(there, "drain")
            for number in (1, 2):
                await there.runs_on(number, "n2")
            await asyncio.sleep(30)
            assert set(there.guests.running.values()) == {"n2"}


async def _fenced(there: Site, arm: Callable[[], None]) -> None:
    n1 = there.host("n1")
    async with there.host("n2").on():
        async with n1.on():
            await asyncio.sleep(1)
            await there.node("cordon", "n2")
            for number in (1, 2):
                await _create(there, number)
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        arm()
        await _ask(there, "fence", confirm=POWERED_OFF)
        for number in (1, 2):
            await there.runs_on(number, "n2")
        async with n1.on():
            await asyncio.sleep(30)
            assert n1.disks == {}
            assert set(there.guests.running.values()) == {"n2"}


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("story", [_drained, _fenced], ids=["drain", "fence"])
def test_a_controller_that_is_killed_at_any_write_loses_and_doubles_nothing(
    story: Story, behind: bool
) -> None:
    async def body() -> None:
        at = 1
        while await killed_at(at, behind=behind, story=story):
            at += 1
        assert at > 7

    run(body)
