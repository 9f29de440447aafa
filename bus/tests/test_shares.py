"""Shares: no account can use all of a shared resource, and queues are bounded in bytes."""

import asyncio
import random

import pytest

from virtbus.bus.client.fair_shares import FairQueue, FairShares
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas.errors import VirtbusError


def _greedy(shares: FairShares, caller: str) -> int:
    held = 0
    while shares.take(caller):
        held += 1
    return held


def test_one_caller_alone_gets_three_quarters_and_the_next_ones_get_a_share_of_the_rest() -> None:
    shares = FairShares(1000)
    assert _greedy(shares, "observer") == 750
    assert _greedy(shares, "bridge") >= 180
    assert _greedy(shares, "client") >= 40
    assert shares.take("one more")


def test_the_controllers_account_is_bounded_by_the_total_only() -> None:
    shares = FairShares(10)
    assert _greedy(shares, "") == 10
    assert not shares.take("other")


def test_limits_of_one_to_three_can_be_used_completely() -> None:
    assert [_greedy(FairShares(total), "a") for total in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 3]


def test_a_returned_share_is_free_again_and_nobody_is_remembered() -> None:
    rng = random.Random(1)
    shares, held = FairShares(10_000), list[tuple[str, int]]()
    for _ in range(5000):
        caller, amount = rng.choice("abc"), rng.randrange(1, 200)
        if shares.take(caller, amount):
            held.append((caller, amount))
        assert shares.held == sum(amount for _, amount in held) <= 10_000
        if held and rng.random() < 0.5:
            shares.release(*held.pop(rng.randrange(len(held))))
    for one in held:
        shares.release(*one)
    assert (shares.held, shares._held) == (0, {})


def test_callers_take_turns_and_each_keeps_its_own_order() -> None:
    turns: FairQueue[int] = FairQueue()
    for number in range(100):
        turns.add("many", number)
    turns.add("few", 1000)
    taken = []
    while callers := list(turns.callers()):
        taken.append(turns.take(callers[0]))
    assert taken[:3] == [0, 1000, 1]
    assert [one for one in taken if one != 1000] == list(range(100))


def test_a_mailbox_over_its_bytes_drops_the_oldest_and_reports_it() -> None:
    box: Mailbox[bytes] = Mailbox(1000, capacity_bytes=100, size_of=len)
    for number in range(10):
        box.put(bytes([number]) * 10)
    assert (len(box), box.overflowed) == (10, False)
    box.put(b"x" * 15)
    assert (len(box), box.overflowed) == (9, True)
    assert box.take() == b"\x02" * 10
    box.put(b"y" * 500)  # the newest is kept at any size
    assert len(box) == 1
    assert box.take() == b"y" * 500
    box.clear()
    for _ in range(2000):
        box.put(b"")
    assert len(box) == 1000


async def test_parked_requests_keep_slots_and_run_no_handler() -> None:
    parked: list[asyncio.Future[None]] = []
    running, most = 0, 0

    async def handler(request: Request) -> asyncio.Future[None]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001)
        await request.stream({"begun": True})
        running -= 1
        parked.append(asyncio.get_running_loop().create_future())
        return parked[-1]

    async def begun(bus: MemoryBus) -> str:
        try:
            async with bus.request_stream("virtbus.try", {}, idle_timeout_s=5) as replies:
                await anext(replies)
        except VirtbusError as error:
            return error.reason
        return "begun"

    server = MemoryServer()
    service, client = MemoryBus(server, "service"), MemoryBus(server, "client")
    endpoint = Endpoint("try", "virtbus.try", handler, limit=20, running=3, backlog=0)
    async with service.serve(ServiceInfo("a", "1.0.0"), [endpoint]), asyncio.TaskGroup() as group:
        asked = [group.create_task(begun(client)) for _ in range(25)]
        async with asyncio.timeout(5):
            while not all(task.done() for task in asked):
                await asyncio.sleep(0.001)
        assert most == 3
        answers = [task.result() for task in asked]
        assert (answers.count("begun"), answers.count("busy")) == (20, 5)
        parked[0].cancel()
        await asyncio.sleep(0.01)
        assert await begun(client) == "begun"
        for one in parked:
            one.cancel()


async def test_the_requester_hears_that_parked_work_was_abandoned() -> None:
    parked: list[asyncio.Future[None]] = []

    async def handler(request: Request) -> asyncio.Future[None]:
        await request.stream({"begun": True})
        parked.append(asyncio.get_running_loop().create_future())
        return parked[-1]

    server = MemoryServer()
    service, client = MemoryBus(server, "service"), MemoryBus(server, "client")
    endpoint = Endpoint("try", "virtbus.try", handler)
    async with service.serve(ServiceInfo("a", "1.0.0"), [endpoint]):
        async with client.request_stream("virtbus.try", {}, idle_timeout_s=5) as replies:
            await anext(replies)
            while not parked:
                await asyncio.sleep(0)
            parked[0].cancel()
            with pytest.raises(VirtbusError) as refused:
                await anext(replies)
        assert refused.value.reason == "given_up"
