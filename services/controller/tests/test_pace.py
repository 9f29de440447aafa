"""Turns leave the loop to others while many wait, and cost a lone caller nothing."""

import asyncio
import itertools
import statistics
import time

from virtbus.controller.edge.pace import Pace

WORK_S = 0.004


def _work() -> None:
    end_s = time.thread_time() + WORK_S
    while time.thread_time() < end_s:
        pass


def test_crowded_work_leaves_most_of_the_loop_to_others() -> None:
    async def body() -> list[tuple[float, float]]:
        pace, turns = Pace(), []

        async def caller() -> None:
            for _ in range(3):
                async with pace.turn("a"):
                    begun_s = time.monotonic()
                    _work()
                    turns.append((begun_s, time.monotonic()))

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(caller())
        return turns

    turns = asyncio.run(body())
    shares = [
        (end_s - begun_s) / (next_s - begun_s)
        for (begun_s, end_s), (next_s, _) in itertools.pairwise(turns)
    ]
    assert 0.1 < statistics.median(shares) < 0.45


def test_a_lone_caller_never_rests() -> None:
    async def body() -> float:
        pace, ratios = Pace(), []
        for _ in range(15):
            begun_s = time.monotonic()
            _work()
            alone_s = time.monotonic() - begun_s
            async with pace.turn("a"):
                _work()
            ratios.append((time.monotonic() - begun_s - alone_s) / alone_s)
        return sorted(ratios)[len(ratios) // 2]

    assert asyncio.run(body()) < 2.0


def test_turns_are_given_in_the_order_of_asking_and_a_cancelled_wait_holds_none() -> None:
    async def body() -> list[int]:
        pace, done = Pace(), []

        async def caller(number: int) -> None:
            async with pace.turn("a"):
                done.append(number)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(caller(number)) for number in range(5)]
            await asyncio.sleep(0.005)
            tasks[2].cancel()
        return done

    assert asyncio.run(body()) == [0, 1, 3, 4]


def test_an_account_with_one_caller_waits_for_one_turn_of_another_with_many() -> None:
    async def body() -> list[str]:
        pace, done = Pace(), list[str]()

        async def caller(account: str) -> None:
            async with pace.turn(account):
                done.append(account)

        async with asyncio.TaskGroup() as group:
            for account in (*["many"] * 50, "one"):
                group.create_task(caller(account))
        return done

    assert asyncio.run(body()).index("one") <= 2


def test_a_turn_that_was_given_to_a_cancelled_caller_goes_to_the_next() -> None:
    async def body() -> list[int]:
        pace, done = Pace(), list[int]()

        async def caller(number: int) -> None:
            async with pace.turn("a"):
                done.append(number)

        async with asyncio.TaskGroup() as group:
            async with pace.turn("a"):
                tasks = [group.create_task(caller(number)) for number in range(3)]
                await asyncio.sleep(0)
            tasks[0].cancel()
        return done

    assert asyncio.run(body()) == [1, 2]
