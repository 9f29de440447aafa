"""Names of other hosts: asked once, stored for seconds, and used again while the bus is away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from services.controller.tests.virtual import run

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.netd.core.resolver_messages import FoundName, Lookup
from virtbus.netd.fleet_names import ASKED_AT_ONCE, FRESH_S, KEPT, FleetNames
from virtbus.netd.name_questions import NameQuestions
from virtbus.schemas import subjects
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.wire import validate

UID = "0192f0c1-2d3e-7abc-8def-00000000000a"
DB = Lookup("shop", namespace="shop", vm="db")


class Played:
    """A controller that knows the VM `db`, and netd's side."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.names = FleetNames(NameQuestions(bus, "n1").ask)
        self.asked: list[NameAsk] = []

    async def answer(self, request: Request) -> NameAnswer:
        self.asked.append(validate(NameAsk, request.data))
        await asyncio.sleep(0.1)
        found = self.asked[-1].name == "db"
        return NameAnswer(found=found, addresses=("10.9.0.5",) if found else ())

    async def find(self, want: Lookup = DB) -> FoundName | None:
        return await self.names.find(want, UID, lambda _now_s: True)


@asynccontextmanager
async def played() -> AsyncIterator[Played]:
    server = MemoryServer()
    made = Played(MemoryBus(server, "netd"))
    endpoint = Endpoint("names-ask", subjects.names_asks(), made.answer)
    async with MemoryBus(server, "controller").serve(ServiceInfo("c", "1.0.0"), [endpoint]):
        yield made


def scenario(body: Callable[[Played], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def whole() -> None:
            async with played() as made:
                await body(made)

        run(whole)

    test.__name__ = body.__name__
    return test


@scenario
async def test_guests_that_ask_together_cost_one_question(made: Played) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made.find()) for _ in range(50)]
    known = FoundName(found=True, addresses=("10.9.0.5",))
    assert [task.result() for task in tasks] == [known] * 50
    assert made.asked == [NameAsk(uid=UID, namespace="shop", name="db")]
    await made.find()
    assert len(made.asked) == 1
    await asyncio.sleep(FRESH_S)
    await made.find()
    assert len(made.asked) == 2


@scenario
async def test_a_name_stays_while_the_bus_is_away_and_nobody_waits_for_it(made: Played) -> None:
    known = await made.find()
    made.bus.disconnect()
    loop = asyncio.get_running_loop()
    for wait_s in (FRESH_S, 600.0):
        await asyncio.sleep(wait_s)
        assert await made.find() == known
        begun_s = loop.time()
        assert await made.find() == known
        assert await made.find(Lookup("shop", namespace="shop", vm="other")) is None
        assert loop.time() == begun_s
    made.bus.reconnect()
    await asyncio.sleep(FRESH_S)
    count = len(made.asked)
    assert await made.find() == known
    assert len(made.asked) == count + 1


@scenario
async def test_an_absence_is_stored_for_seconds_and_displaces_no_name(made: Played) -> None:
    known = await made.find()
    for number in range(KEPT + 10):
        made.names._keep(Lookup("shop", vm=f"x{number}"), FoundName(), 0.0)
    assert len(made.names._absent) == KEPT
    made.bus.disconnect()
    await asyncio.sleep(FRESH_S)
    assert await made.find() == known


@scenario
async def test_open_questions_are_bounded_and_a_guest_may_have_none_left(made: Played) -> None:
    wanted = [Lookup("shop", namespace="shop", vm=f"x{number}") for number in range(200)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made.find(want)) for want in wanted]
    assert sum(task.result() is not None for task in tasks) == ASKED_AT_ONCE
    assert len(made.asked) == ASKED_AT_ONCE
    assert await made.names.find(DB, UID, lambda _now_s: False) is None
    assert len(made.asked) == ASKED_AT_ONCE


@scenario
async def test_a_cancelled_question_keeps_nobody_waiting(made: Played) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(made.find())
        await asyncio.sleep(0)
        second = group.create_task(made.find())
        await asyncio.sleep(0)
        first.cancel()
    assert second.result() is None
    assert (await made.find()) == FoundName(found=True, addresses=("10.9.0.5",))
