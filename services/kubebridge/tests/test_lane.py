"""The webhooks' lane serves sources in turns, and namespaces within each source in turns."""

import asyncio

from virtbus.kubebridge.edge.fair_turns import FairTurns


async def ordered(*waiting: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the order of turns for waiters that came during another turn."""
    lane, had, go_on = FairTurns(), list[tuple[str, str]](), asyncio.Event()

    async def work(source: str, namespace: str) -> None:
        async with lane.turn(source, namespace):
            had.append((source, namespace))

    async def first() -> None:
        async with lane.turn("", ""):
            await go_on.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        for one in waiting:
            group.create_task(work(*one))
        await asyncio.sleep(0.01)
        go_on.set()
    return had


async def test_sources_take_turns() -> None:
    flood = [("stranger", f"ns-{n}") for n in range(50)]
    had = await ordered(*flood, ("server", "a"))
    assert ("server", "a") in had[:2]
    assert len(had) == 51


async def test_namespaces_of_a_source_take_turns() -> None:
    had = await ordered(*[("server", "greedy")] * 50, ("server", "other"))
    assert had[:2] == [("server", "greedy"), ("server", "other")]


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    lane, had = FairTurns(), list[str]()

    async def work(name: str) -> None:
        async with lane.turn(name):
            had.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(work(name)) for name in "abcd"}
        await asyncio.sleep(0)  # all are waiting
        tasks["a"].cancel()
        await asyncio.sleep(0)  # one of the others gets its turn
        tasks["b"].cancel()
    assert had[-2:] == ["c", "d"]
    async with asyncio.timeout(1), lane.turn("again"):
        pass
