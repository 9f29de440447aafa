"""Who waits for the webhooks' one lane: sources take turns, and namespaces within each."""

import asyncio

from virtbus.kubebridge.edge.lane import Lane


async def ordered(*waiting: tuple[str, str]) -> list[tuple[str, str]]:
    """In which order they had their turns, where all came while one was under way."""
    lane, had, go_on = Lane(), list[tuple[str, str]](), asyncio.Event()

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


async def test_a_source_with_many_waits_for_its_turn_among_sources() -> None:
    flood = [("stranger", f"ns-{n}") for n in range(50)]
    had = await ordered(*flood, ("server", "a"))
    assert ("server", "a") in had[:2]
    assert len(had) == 51


async def test_a_namespace_with_many_waits_for_its_turn_among_namespaces() -> None:
    had = await ordered(*[("server", "greedy")] * 50, ("server", "other"))
    assert had[:2] == [("server", "greedy"), ("server", "other")]


async def test_who_gives_up_passes_its_turn_on() -> None:
    lane, had = Lane(), list[str]()

    async def work(name: str) -> None:
        async with lane.turn(name):
            had.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(work(name)) for name in "abcd"}
        await asyncio.sleep(0)  # all wait
        tasks["a"].cancel()
        await asyncio.sleep(0)  # the first of the others is granted
        tasks["b"].cancel()
    assert had[-2:] == ["c", "d"]
    async with asyncio.timeout(1), lane.turn("again"):
        pass
