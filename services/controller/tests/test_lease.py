"""A lease has one holder, even if processes stop, lag or are cut off."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from services.controller.tests.virtual import run, settle

from virtbus.bus.client.memory_bus import Fault, MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.runtime.tasks import background
from virtbus.controller.edge.lease import (
    LOOK_S,
    MARGIN_S,
    TTL_S,
    LeaderTerm,
    LeaseLostError,
    Leases,
)
from virtbus.schemas import subjects

KEY = subjects.lease("fleet")


def server() -> MemoryServer:
    """Its time is the loop's, so that TTLs pass with it."""
    loop = asyncio.get_running_loop()
    return MemoryServer(lambda: int(loop.time() * 1e9))


class Rival:
    """A process that always wants the lease, and records its acts."""

    def __init__(self, shared: MemoryServer, name: str, acts: list[tuple[float, str, int]]) -> None:
        self.bus = MemoryBus(shared, name)
        self.leases = Leases(self.bus, name)
        self.name = name
        self.losses = 0
        self.tenure: LeaderTerm | None = None
        self._acts = acts

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with self.leases.hold("fleet") as self.tenure:
                    while True:
                        self._acts.append((loop.time(), self.name, self.tenure.check()))
                        await asyncio.sleep(0.5)
            except LeaseLostError:
                self.losses += 1


@asynccontextmanager
async def rivals(count: int) -> AsyncIterator[tuple[list[Rival], list[tuple[float, str, int]]]]:
    shared, acts = server(), list[tuple[float, str, int]]()
    found = [Rival(shared, f"c{number}", acts) for number in range(count)]
    async with background() as tasks:
        for one in found:
            tasks.start(one.run())
            await settle()
        yield found, acts


async def held(bus: MemoryBus, do: Callable[[LeaderTerm], Awaitable[None]]) -> None:
    async with Leases(bus, "a").hold("fleet") as tenure:
        await do(tenure)


def changes(acts: list[tuple[float, str, int]]) -> list[tuple[float, float]]:
    """The ends and starts of terms; the fencing token rises with every change."""
    found = []
    for (end_s, last, old), (begin_s, first, new) in pairwise(acts):
        if last != first:
            assert new > old
            found.append((end_s, begin_s))
        else:
            assert new >= old
    return found


def test_one_of_many_holds_it_for_as_long_as_it_lives() -> None:
    async def scenario() -> None:
        async with rivals(3) as (_, acts):
            await asyncio.sleep(120)
            assert {name for _, name, _ in acts} == {"c0"}
            assert changes(acts) == []

    run(scenario)


def test_a_holder_that_leaves_releases_its_lease_at_once() -> None:
    async def scenario() -> None:
        shared = server()
        async with Leases(MemoryBus(shared, "a"), "a").hold("fleet") as first:
            token = first.check()
        with pytest.raises(LeaseLostError):
            first.check()
        async with (
            asyncio.timeout(LOOK_S),
            Leases(MemoryBus(shared, "b"), "b").hold("fleet") as second,
        ):
            assert second.check() > token

    run(scenario)


def test_a_holder_that_is_cut_off_stops_before_another_begins() -> None:
    async def scenario() -> None:
        async with rivals(2) as (found, acts):
            await asyncio.sleep(10)
            cut_s = asyncio.get_running_loop().time()
            found[0].bus.disconnect()
            await asyncio.sleep(60)
            ((end_s, begin_s),) = changes(acts)
            assert end_s < cut_s + TTL_S - MARGIN_S
            assert begin_s >= end_s + MARGIN_S - LOOK_S
            assert begin_s < cut_s + TTL_S + LOOK_S + 1
            assert found[0].losses == 1
            found[0].bus.reconnect()
            await asyncio.sleep(60)
            assert len(changes(acts)) == 1, "who comes back waits"

    run(scenario)


def test_a_holder_that_was_stopped_acts_no_more() -> None:
    """SIGSTOP for longer than the TTL: at SIGCONT its term is over, and so is its current act."""

    async def scenario() -> None:
        shared = server()
        loop = asyncio.get_running_loop()
        stopped = MemoryBus(shared, "a")

        async def stop(tenure: LeaderTerm) -> None:
            stopped.disconnect()
            loop._jump.now_s += TTL_S * 2  # type: ignore[attr-defined]  # the virtual clock
            tenure.check()

        with pytest.raises(LeaseLostError):
            await held(stopped, stop)

    run(scenario)


def test_a_lease_taken_by_another_ends_the_term() -> None:
    async def scenario() -> None:
        shared = server()
        thief = MemoryBus(shared, "b")

        async def stolen(_: LeaderTerm) -> None:
            await thief.put(KEY, b"\x81\xa6holder\xa1b")
            await asyncio.sleep(60)

        with pytest.raises(LeaseLostError):
            await held(MemoryBus(shared, "a"), stolen)
        entry = await thief.get(KEY)
        assert entry is not None
        assert entry.kind is EntryKind.PUT, "what another holds is not ours to give back"

    run(scenario)


@pytest.mark.parametrize("fault", Fault)
def test_a_renewal_of_unknown_outcome_loses_nothing(fault: Fault) -> None:
    async def scenario() -> None:
        bus = MemoryBus(server(), "a")
        async with Leases(bus, "a").hold("fleet") as tenure:
            first = tenure.check()
            bus.faults.append(fault)
            await asyncio.sleep(30)
            assert tenure.check() > first

    run(scenario)


def test_a_lease_whose_ttl_never_expires_is_still_taken_over() -> None:
    """As after a restore from a backup: nobody renews, and nothing expires."""

    async def scenario() -> None:
        shared = server()
        bus = MemoryBus(shared, "b")
        await bus.put(KEY, b"\x81\xa6holder\xa1a")
        begun_s = asyncio.get_running_loop().time()
        async with Leases(bus, "b").hold("fleet"):
            waited_s = asyncio.get_running_loop().time() - begun_s
        assert TTL_S < waited_s < TTL_S + MARGIN_S + 2 * LOOK_S

    run(scenario)


def test_a_renewal_that_is_seen_proves_that_the_bus_takes_writes() -> None:
    async def scenario() -> None:
        async with rivals(2) as (found, _):
            loop = asyncio.get_running_loop()
            await asyncio.sleep(60)
            assert all(loop.time() - one.leases.proved_s < 7 for one in found)
            for one in found:
                one.bus.disconnect()
            cut_s = loop.time()
            await asyncio.sleep(60)
            assert all(one.leases.proved_s <= cut_s for one in found)

    run(scenario)
