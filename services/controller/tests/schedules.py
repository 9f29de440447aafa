"""Runs controllers over the fake bus in a chosen order of calls, or stops them at a chosen call.

Every call to the bus waits at a gate, and the schedule chooses the next one. `explore` runs a
scenario once for every schedule (depth first, by replay), so that a race does not depend on
luck.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import BusError

CALLS = ("get", "put", "purge", "batch")


class Choose(Protocol):
    """Chooses one of `options`; 0 continues with the last call's actor if it is `pausing`."""

    def __call__(self, options: int, *, pausing: bool) -> int: ...


class Gates:
    """Lets one actor's call through at a time, in the order of `choose`."""

    def __init__(self, choose: "Choose") -> None:
        self._choose = choose
        self._last = ""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()

    async def enter(self, actor: str) -> None:
        """Wait for this actor's turn."""
        turn = self._waiting[actor] = asyncio.get_running_loop().create_future()
        self._moved.set()
        await turn

    async def run(self, actors: dict[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Return each actor's result or exception, once all have ended."""
        results: dict[str, Any] = {}

        async def act(name: str, work: Awaitable[Any]) -> None:
            try:
                await self.enter(name)
                results[name] = await work
            except Exception as error:  # noqa: BLE001  a result like another, for the test
                results[name] = error
            self._moved.set()

        async with asyncio.TaskGroup() as group:
            for name, work in actors.items():
                group.create_task(act(name, work))
            while len(results) < len(actors):
                self._moved.clear()
                if len(self._waiting) + len(results) < len(actors):
                    await self._moved.wait()
                    continue
                names = sorted(self._waiting, key=lambda name: (name != self._last, name))
                pausing = self._last in self._waiting
                self._last = names[self._choose(len(names), pausing=pausing)]
                self._waiting.pop(self._last).set_result(None)
        return results


class ScheduledBus(MemoryBus):
    """A connection whose calls wait at the gates, under its own name."""

    def __init__(self, server: MemoryServer, actor: str, gates: Gates) -> None:
        super().__init__(server, actor)
        self.actor = actor
        self.gates = gates

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        async def gated(*args: Any, **more: Any) -> Any:
            await self.gates.enter(self.actor)
            return await found(*args, **more)

        return gated


Scenario = Callable[[Gates], Awaitable[None]]


async def explore(scenario: Scenario, *, pauses: int) -> int:
    """Run `scenario` under every schedule with at most `pauses` pauses; return their number.

    A pause is a switch away from an actor that could continue. Schedules with few pauses find
    nearly every race (Musuvathi and Qadeer, PLDI 2007).
    """
    prefix: list[int] = []
    runs = 0
    while True:
        replay = Replay(prefix, pauses)
        await scenario(Gates(replay))
        runs += 1
        taken = replay.taken
        while taken and taken[-1][0] + 1 >= taken[-1][1]:
            taken.pop()
        if not taken:
            return runs
        prefix = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


class Replay:
    """Follows a schedule, then continues with the last actor."""

    def __init__(self, prefix: list[int], pauses: int) -> None:
        self.taken: list[tuple[int, int]] = []
        self._prefix = prefix
        self._left = pauses

    def __call__(self, options: int, *, pausing: bool) -> int:
        options = options if self._left or not pausing else 1
        at = len(self.taken)
        choice = self._prefix[at] if at < len(self._prefix) else 0
        self._left -= pausing and choice > 0
        self.taken.append((choice, options))
        return choice


async def sample(scenario: Scenario, *, runs: int) -> None:
    """Run `scenario` under `runs` schedules drawn with fixed seeds."""
    for seed in range(runs):
        await scenario(Gates(Drawn(seed)))


class Drawn:
    """Choose any of the options, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, options: int, *, pausing: bool) -> int:
        del pausing
        return self._random.randrange(options)


class BreakingBus(MemoryBus):
    """A connection whose user is cancelled at call number `at`, before it or right after it."""

    def __init__(self, server: MemoryServer, at: int, *, behind: bool) -> None:
        super().__init__(server, "breaking")
        self.calls = 0
        self._at = at
        self._behind = behind

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        async def breaking(*args: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls != self._at:
                return await found(*args, **more)
            if self._behind:
                with contextlib.suppress(BusError):  # a lost race may also be its last event
                    await found(*args, **more)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return await asyncio.sleep(0)

        return breaking


async def until_broken(
    server: MemoryServer, use: Callable[[MemoryBus], Awaitable[Any]], at: int, *, behind: bool
) -> bool:
    """Use a bus that breaks at call `at`; return False if the use ended before that call."""
    bus = BreakingBus(server, at, behind=behind)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_ended(use(bus)))
    return task.cancelled()


async def _ended(work: Awaitable[Any]) -> None:
    await work


def points() -> Iterator[tuple[int, bool]]:
    """Yield every breaking point: before and after each call."""
    number = 1
    while True:
        yield number, False
        yield number, True
        number += 1


async def broken_everywhere(
    prepare: Callable[[], Awaitable[MemoryServer]], use: Callable[[MemoryBus], Awaitable[Any]]
) -> AsyncIterator[MemoryServer]:
    """Yield a fresh server for each point at which `use` was broken."""
    for at, behind in points():
        server = await prepare()
        if not await until_broken(server, use, at, behind=behind):
            return
        yield server
