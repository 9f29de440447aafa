"""The work queue merges changes of a key, serialises its reconciles, and retries failures."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from virtbus.bus.tasks import background
from virtbus.kubebridge.edge import work
from virtbus.kubebridge.edge.cluster import Answer
from virtbus.kubebridge.edge.work import Work


@asynccontextmanager
async def working(
    look: Callable[[str], Awaitable[float]], *, may: bool = True
) -> AsyncIterator[tuple[Work, asyncio.Event]]:
    queue, gate = Work(look), asyncio.Event()
    if may:
        gate.set()
    async with background() as tasks:
        tasks.start(queue.run(gate))
        yield queue, gate


async def settled(queue: Work) -> None:
    await asyncio.sleep(work.REST_S * 1.5)
    while not queue.idle:
        await asyncio.sleep(0.01)


async def test_many_changes_of_a_key_are_two_reconciles() -> None:
    looks: Counter[str] = Counter()

    async def look(key: str) -> float:
        looks[key] += 1
        await asyncio.sleep(0.02)
        return 0.0

    async with working(look) as (queue, _):
        queue.add("a")
        await asyncio.sleep(0.01)
        for _ in range(100):
            queue.add("a")
            queue.add("b")
        await settled(queue)
        assert looks == {"a": 2, "b": 1}


async def test_a_key_is_serialised_and_others_run_concurrently() -> None:
    busy: set[str] = set()
    most = 0

    async def look(key: str) -> float:
        nonlocal most
        assert key not in busy
        busy.add(key)
        most = max(most, len(busy))
        await asyncio.sleep(0.02)
        busy.discard(key)
        return 0.0

    async with working(look) as (queue, _):
        for round_ in range(5):
            for number in range(100):
                queue.add(f"k{number}")
            await asyncio.sleep(0.01 * round_)
        await settled(queue)
        assert 8 < most <= work.AT_ONCE


async def test_a_failed_key_is_retried_with_growing_delays() -> None:
    times: list[float] = []

    async def look(_: str) -> float:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 4:
            raise Answer({"code": 500})
        return 0.0

    async with working(look) as (queue, _):
        queue.add("a")
        while len(times) < 4:
            await asyncio.sleep(0.01)
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert pauses[0] >= 0.1
        assert pauses[2] >= 0.4


async def test_an_unexpected_exception_does_not_stop_the_queue() -> None:
    seen: list[str] = []

    async def look(key: str) -> float:
        seen.append(key)
        if key == "bad":
            raise KeyError(key)
        return 0.0

    async with working(look) as (queue, _):
        queue.add("bad")
        queue.add("good")
        await settled(queue)
        assert "good" in seen


async def test_a_reconcile_may_request_another_one() -> None:
    seen: list[str] = []

    async def look(key: str) -> float:
        seen.append(key)
        return 0.05 if len(seen) < 3 else 0.0

    async with working(look) as (queue, _):
        queue.add("a")
        while len(seen) < 3:
            await asyncio.sleep(0.01)


async def test_keys_stay_queued_without_the_lease() -> None:
    seen: list[str] = []

    async def look(key: str) -> float:
        seen.append(key)
        return 0.0

    async with working(look, may=False) as (queue, gate):
        for _ in range(3):
            queue.add("a")
        await asyncio.sleep(0.05)
        assert seen == []
        gate.set()
        await settled(queue)
        assert seen == ["a"]


async def test_a_waiting_bridge_drops_keys_of_deleted_objects() -> None:
    looked: list[str] = []

    async def look(key: str) -> float:
        looked.append(key)
        return 0.0

    async with working(look, may=False) as (queue, gate):
        for number in range(10_000):
            queue.add(f"gone{number}")
        queue.add("there")
        while queue._queue.qsize() > 10_001 - work.AT_ONCE:  # each worker holds one
            await asyncio.sleep(0)
        queue.forget_but({"there"})
        assert len(queue._queued) == work.AT_ONCE + 1
        queue.add("there")
        gate.set()
        await settled(queue)
    assert Counter(looked)["there"] == 1
    assert len(looked) == work.AT_ONCE + 1
