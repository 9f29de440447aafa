"""Claim and commit: racing creates, deletes and sweeps, and the remains of a crash."""

from collections.abc import Coroutine
from typing import Any

import pytest
from services.controller.tests.fleets import record, uid
from services.controller.tests.schedules import (
    Gates,
    ScheduledBus,
    broken_everywhere,
    explore,
    sample,
)
from services.controller.tests.test_commit import (
    CLAIM,
    check_clean,
    check_names,
    created,
    records,
    secrets,
    standing,
    sweep,
    swept,
)

from virtbus.bus.client.memory_bus import Fault, MemoryBus, MemoryServer
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.controller.edge.commit import Commits
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord
from virtbus.schemas.wire import encode


# --- races -----------------------------------------------------------------------------------
async def race(gates: Gates, *rivals: VmRecord, sweeps: int = 0, secret: bool = False) -> None:
    """With `secret` each rival has secrets of its own."""
    server = MemoryServer()
    actors: dict[str, Coroutine[Any, Any, Any]] = {
        f"c{i}": Commits(ScheduledBus(server, f"c{i}", gates)).create(
            rival, secrets(int(rival.uid[-1]), f"of c{i}") if secret else None
        )
        for i, rival in enumerate(rivals)
    }
    actors |= {f"s{i}": sweep(ScheduledBus(server, f"s{i}", gates)) for i in range(sweeps)}
    results = await gates.run(actors)
    check_names(server)
    winners = [result for result in results.values() if created(result)]
    assert len(winners) == len(records(server)) <= 1
    for result in results.values():
        assert not isinstance(result, Exception) or isinstance(result, VirtbusError), result
    for _ in range(2):
        await swept(server)
    check_clean(server)


async def test_one_of_two_creates_of_one_name_wins_in_every_order() -> None:
    async def scenario(gates: Gates) -> None:
        await race(gates, record(1), record(2))

    assert await explore(scenario, pauses=3) > 50


async def test_one_of_two_creates_of_one_uid_wins_in_every_order() -> None:
    async def scenario(gates: Gates) -> None:
        await race(gates, record(1), record(1, node="n2"))

    await explore(scenario, pauses=3)


@pytest.mark.parametrize("sweeps", [0, 1])
async def test_the_winner_of_two_creates_of_one_uid_has_its_own_secrets_in_every_order(
    sweeps: int,
) -> None:
    async def scenario(gates: Gates) -> None:
        await race(gates, record(1), record(1), sweeps=sweeps, secret=True)

    assert await explore(scenario, pauses=2) > 20


@pytest.mark.parametrize(
    "rivals",
    [
        (record(1), record(2), record(3)),
        (record(1), record(1, node="n2"), record(2)),
        (record(1), record(1, node="n2"), record(2), record(2, node="n2")),
    ],
    ids=lambda rivals: str(len(rivals)),
)
async def test_one_of_many_creates_and_a_sweep_wins(rivals: tuple[VmRecord, ...]) -> None:
    async def scenario(gates: Gates) -> None:
        await race(gates, *rivals, sweeps=1)

    await sample(scenario, runs=400)


async def test_a_hundred_races_of_two_controllers_have_one_winner_each() -> None:
    async def scenario(gates: Gates) -> None:
        await race(gates, record(1), record(2), sweeps=2)

    await sample(scenario, runs=100)


async def left_by_a_crash(server: MemoryServer) -> None:
    """The claim of a create that died before its commit, and a dead rival's tombstone."""
    bus = MemoryBus(server)
    await bus.put(CLAIM, encode(NameClaim(uid=uid(1))), expect=0)
    await bus.put(subjects.vm_record("_", uid(1)), encode(Tombstone(uid=uid(1))), expect=0)


@pytest.mark.parametrize("against", ["another uid", "a sweep"])
async def test_a_repeated_create_with_a_tombstone_races_for_its_name(against: str) -> None:
    """Its claim still exists, so one of the two compare-and-sets on the claim must fail."""

    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        await left_by_a_crash(server)
        again = Commits(ScheduledBus(server, "again", gates)).create(record(1), None)
        rival = ScheduledBus(server, "rival", gates)
        other = sweep(rival) if against == "a sweep" else Commits(rival).create(record(2), None)
        results = await gates.run({"again": again, "rival": other})
        check_names(server)
        assert sum(map(created, results.values())) == len(records(server)) == 1
        await swept(server)
        check_clean(server)

    assert await explore(scenario, pauses=3) > 10


# --- crashes ---------------------------------------------------------------------------------
async def nothing() -> MemoryServer:
    return MemoryServer()


async def buried() -> MemoryServer:
    server = MemoryServer()
    await left_by_a_crash(server)
    return server


async def claimed_by_a_dead_rival() -> MemoryServer:
    server = MemoryServer()
    await MemoryBus(server).put(CLAIM, encode(NameClaim(uid=uid(9))), expect=0)
    return server


async def deleted_before() -> MemoryServer:
    server = MemoryServer()
    commits = Commits(MemoryBus(server))
    await commits.finish((await commits.create(record(9), secrets(9))).held)
    return server


@pytest.mark.parametrize("prepare", [nothing, buried, claimed_by_a_dead_rival, deleted_before])
@pytest.mark.parametrize("then", ["the same uid", "another uid", "a sweep", "a sweep, then both"])
async def test_a_create_may_crash_at_every_call(prepare: Any, then: str) -> None:
    """ADR 0003's crash table: any next request leads to one VM or none, and nothing else."""
    crashes = 0
    async for server in broken_everywhere(
        prepare, lambda bus: Commits(bus).create(record(1), secrets(1))
    ):
        crashes += 1
        commits = Commits(MemoryBus(server))
        had = [one.uid for one in records(server)]
        if "sweep" in then:
            await swept(server)
            check_clean(server)
            assert [one.uid for one in records(server)] == had
        if then in {"the same uid", "a sweep, then both"}:
            again = await commits.create(record(1), secrets(1))
            assert again.created == (not had)
            assert [one.uid for one in records(server)] == [uid(1)]
        if then == "another uid" and not had:
            assert (await commits.create(record(2), secrets(2))).created
        elif then in {"another uid", "a sweep, then both"}:
            with pytest.raises(VirtbusError) as caught:
                await commits.create(record(2), secrets(2))
            assert caught.value.code == 409
        check_names(server)
        await swept(server)
        check_clean(server)
    assert crashes >= 6


async def test_a_delete_may_crash_at_every_call() -> None:
    async def there() -> MemoryServer:
        server = MemoryServer()
        await Commits(MemoryBus(server)).create(record(), secrets(1))
        return server

    async def finish(bus: MemoryBus) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Commits(bus).finish(held)

    crashes = 0
    async for server in broken_everywhere(there, finish):
        crashes += 1
        commits = Commits(MemoryBus(server))
        held = await commits.latest(uid(1))
        if held is not None:
            await commits.finish(held)
        await swept(server)
        assert standing(server) == {}
        with pytest.raises(VirtbusError) as caught:
            await commits.create(record(1), None)
        assert caught.value.code == 410
        assert (await commits.create(record(2), None)).created
        check_clean(server)
    assert crashes >= 6


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("number", range(3))
async def test_a_write_that_fails_or_is_unknown_is_settled_by_repeating(
    fault: Fault, number: int
) -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    real = bus.put
    calls = 0

    async def put(*args: Any, **more: Any) -> int:
        nonlocal calls
        if calls == number:
            bus.faults.append(fault)
        calls += 1
        return await real(*args, **more)

    bus.put = put  # type: ignore[method-assign]  # the wire's fault at exactly this write
    with pytest.raises((UnavailableError, OutcomeUnknownError)):
        await Commits(bus).create(record(), secrets(1))
    await Commits(MemoryBus(server)).create(record(), secrets(1))
    assert len(records(server)) == 1
    check_clean(server)
