"""The work queue merges changes of a key, serialises its reconciles, and retries failures."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import VM, VMI, Key
from virtbus.kubebridge.edge.cluster import StatusError
from virtbus.kubebridge.edge.runtime.workqueue import REST_S, Lane, WorkQueue

AT_ONCE = 32


class Named(WorkQueue):
    """A queue of VMs, named by strings."""

    def put(self, name: str) -> None:
        self.add(Key(VM, "default", name))


@asynccontextmanager
async def working(
    look: Callable[[str], Awaitable[float]], *, may: bool = True
) -> AsyncIterator[tuple[Named, asyncio.Event]]:
    gate = asyncio.Event()
    queue = Named(gate)
    queue.add_lane(VM, Lane(lambda key: look(key.name), AT_ONCE))
    if may:
        gate.set()
    async with background() as tasks:
        tasks.start(queue.run())
        yield queue, gate


async def settled(queue: WorkQueue) -> None:
    await asyncio.sleep(REST_S * 1.5)
    while not queue.idle:
        await asyncio.sleep(0.01)


async def test_many_changes_of_a_key_are_two_reconciles() -> None:
    looks: Counter[str] = Counter()

    async def look(key: str) -> float:
        looks[key] += 1
        await asyncio.sleep(0.02)
        return 0.0

    async with working(look) as (queue, _):
        queue.put("a")
        await asyncio.sleep(0.01)
        for _ in range(100):
            queue.put("a")
            queue.put("b")
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
                queue.put(f"k{number}")
            await asyncio.sleep(0.01 * round_)
        await settled(queue)
        assert 8 < most <= AT_ONCE


async def test_a_failed_key_is_retried_with_growing_delays() -> None:
    times: list[float] = []

    async def look(_: str) -> float:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 4:
            raise StatusError({"code": 500})
        return 0.0

    async with working(look) as (queue, _):
        queue.put("a")
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
        queue.put("bad")
        queue.put("good")
        await settled(queue)
        assert "good" in seen


async def test_a_reconcile_may_request_another_one() -> None:
    seen: list[str] = []

    async def look(key: str) -> float:
        seen.append(key)
        return 0.05 if len(seen) < 3 else 0.0

    async with working(look) as (queue, _):
        queue.put("a")
        while len(seen) < 3:
            await asyncio.sleep(0.01)


async def test_without_the_lease_keys_are_dropped_and_the_queue_knows_it() -> None:
    seen: list[str] = []

    async def look(key: str) -> float:
        seen.append(key)
        return 0.0

    async with working(look, may=False) as (queue, gate):
        for number in range(10_000):
            queue.put(f"gone{number}")
        assert queue.idle
        assert queue.dropped
        gate.set()
        queue.put("there")
        await settled(queue)
        assert seen == ["there"]


async def test_a_kind_has_its_own_workers() -> None:
    """Slow guest agents do not delay VMIs, and objects of one name are different keys."""
    gate, release = asyncio.Event(), asyncio.Event()
    gate.set()
    seen: list[Key] = []

    async def slow(_: Key) -> float:
        await release.wait()
        return 0.0

    async def fast(key: Key) -> float:
        seen.append(key)
        return 0.0

    queue = WorkQueue(gate)
    queue.add_lane(VM, Lane(slow, workers=1))
    queue.add_lane(VMI, Lane(fast, workers=1))
    async with asyncio.timeout(30), background() as tasks:
        tasks.start(queue.run())
        for name in "ab":
            queue.add(Key(VM, "default", name))
        queue.add(Key(VMI, "default", "a"))
        while not seen:
            await asyncio.sleep(0.01)
        assert seen == [Key(VMI, "default", "a")]
        release.set()
