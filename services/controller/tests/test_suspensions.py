"""A controller that was suspended executes no request that waited meanwhile (F41)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.controller.tests.test_vm_api import refused
from services.controller.tests.virtual import World, run, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Entry, Request, Watch
from virtbus.bus.errors import UnavailableError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.edge.suspensions import Suspensions
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings


class SlowBus(MemoryBus):
    """Lists nothing before `listed`, and answers no read before `answers`."""

    listed: asyncio.Event
    answers: asyncio.Event

    @asynccontextmanager
    async def watch(self, *filters: str) -> AsyncIterator[Watch]:
        await self.listed.wait()
        async with super().watch(*filters) as watch:
            yield watch

    async def get(self, key: str) -> Entry | None:
        if not self.answers.is_set():
            await asyncio.sleep(0.3)
            raise UnavailableError
        return await super().get(key)


async def _declared() -> None:
    """The fake needs no declaration of its streams."""


def slow(made: World) -> SlowBus:
    bus = SlowBus(made.server, "c1")
    bus.listed, bus.answers = asyncio.Event(), asyncio.Event()
    return bus


async def suspend(for_s: float) -> None:
    """SIGSTOP and SIGCONT, on the virtual clock."""
    loop = asyncio.get_running_loop()
    loop._jump.now_s += for_s  # type: ignore[attr-defined]
    await settle()


def test_a_request_that_waited_for_the_first_list_is_refused() -> None:
    async def body() -> None:
        made = World()
        bus = slow(made)
        bus.answers.set()
        loop = asyncio.get_running_loop()
        async with background() as tasks:
            tasks.start(ControllerService(bus, Settings(), _declared).run())
            await asyncio.sleep(2)
            await suspend(30)
            loop.call_later(5, bus.listed.set)
            assert (await refused(made.ask("get", uid="none"))).reason == "stalled"
            assert (await refused(made.ask("get", uid="none"))).reason != "stalled"

    run(body)


def test_requests_are_refused_until_the_bus_has_answered() -> None:
    def request() -> Request:
        now_s = asyncio.get_running_loop().time()

        async def stream(_: object) -> None: ...

        return Request("x", {}, "1", now_s + 5, "r", None, True, stream, received_s=now_s)

    async def body() -> None:
        bus = slow(World())
        found = Suspensions(bus)
        assert not found.waited(request())
        async with background() as tasks:
            tasks.start(found.run())
            await asyncio.sleep(10)
            assert not found.waited(request())
            await suspend(30)
            late = request()
            await asyncio.sleep(20)
            assert found.waited(late)
            assert found.waited(request()), "the bus is away"
            bus.answers.set()
            await asyncio.sleep(5)
            assert found.waited(late), "it may be outdated for ever"
            assert not found.waited(request())

    run(body)
