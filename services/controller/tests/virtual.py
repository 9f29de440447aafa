"""A controller over the fake bus in virtual time: waiting costs nothing and is exact."""

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.controller.tests.fleets import node

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.tasks import background
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.node_rpc import HeldResources, KnownRecords
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus, VmView
from virtbus.schemas.wire import encode, validate

HOSTS = 9
"""The number of hosts that answer controllers, if a test has none of its own."""


class _Jump(selectors.SelectSelector):
    """Advances the clock to the next time-out instead of waiting."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            msg = "everybody waits for ever"
            raise AssertionError(msg)
        self.now_s += max(timeout, 0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


@dataclass
class World:
    """One bus; controllers by name, and a client's connection."""

    server: MemoryServer = field(default_factory=MemoryServer)
    controllers: dict[str, ControllerService] = field(default_factory=dict)
    buses: dict[str, MemoryBus] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = MemoryBus(self.server, "client")
        self.host = MemoryBus(self.server, "host")

    async def ask(self, verb: str, resource: str = "vm", **data: Any) -> Any:
        """Return the API's data."""
        return await self.client.request(subjects.api(resource, verb), data, timeout_s=10)

    async def vm(self, verb: str, **data: Any) -> VmView:
        """Return the API's data, for verbs that answer a VM."""
        answer = await self.ask(verb, **data)
        return validate(VmView, answer["vm"] if verb == "create" else answer)

    async def hear(self, one: NodeRecord) -> None:
        """Write a node's heartbeat."""
        await self.host.put(subjects.node_record(one.node), encode(one))

    async def say(self, one: VmStatus) -> None:
        """Write a node's status of a VM."""
        await self.host.put(subjects.vm_status(one.node, one.uid), encode(one))

    async def stored(self, uid: str) -> VmRecord | None:
        """Return the record on the bus."""
        entry = await self.host.get(subjects.vm_anywhere(uid))
        return validate(VmRecord, _decoded(entry.value)) if entry and entry.value else None

    def watch(self, **data: Any) -> Any:
        """Return the replies to `vm.watch`."""
        return self.client.request_stream(subjects.api("vm", "watch"), data, idle_timeout_s=60)


def _decoded(value: bytes) -> Mapping[str, Any]:
    import msgpack

    found: Mapping[str, Any] = msgpack.unpackb(value)
    return found


def world(*, controllers: int = 1, nodes: int = 1) -> AbstractAsyncContextManager[World]:
    """Running controllers that have read the bus, and nodes that keep answering."""
    return world_on(MemoryServer(), controllers=controllers, nodes=nodes)


@asynccontextmanager
async def world_on(server: MemoryServer, *, controllers: int, nodes: int) -> AsyncIterator[World]:
    """The same on a server of the test's own."""
    made = World(server)
    async with background() as tasks, _hosts(server):
        for number in range(1, nodes + 1):
            await made.hear(node(f"n{number}"))
        for number in range(1, controllers + 1):
            bus = MemoryBus(made.server, f"c{number}")
            made.buses[bus._name] = bus
            made.controllers[bus._name] = ControllerService(bus, Settings(), _declared)
            tasks.start(made.controllers[bus._name].run())
        await settle()
        yield made


@asynccontextmanager
async def _hosts(server: MemoryServer) -> AsyncIterator[None]:
    """Hosts without VMs and volumes; a service of a test's own answers in their place."""

    async def records(_: Request) -> KnownRecords:
        return KnownRecords(node="none")

    async def held(_: Request) -> HeldResources:
        return HeldResources()

    names = [f"n{number}" for number in range(1, HOSTS + 1)]
    endpoints = [
        *(Endpoint("records", subjects.rpc(one, "agent", "records"), records) for one in names),
        *(Endpoint("inspect", subjects.rpc(one, "imaged", "inspect"), held) for one in names),
    ]
    before = len(server.subscribed)
    async with MemoryBus(server, "hosts").serve(ServiceInfo("hosts", "1"), endpoints):
        mine = server.subscribed[before:]
        others = MemoryServer()
        others.subscribed, route = mine, server.route
        server.route = lambda raw: route(raw) or others.route(raw)  # type: ignore[method-assign]
        for one in mine:
            server.subscribed.remove(one)
        try:
            yield
        finally:
            server.subscribed += others.subscribed
            server.route = route  # type: ignore[method-assign]


async def _declared() -> None:
    """The fake needs no declaration of its streams."""


async def settle() -> None:
    """Run everything that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario in virtual time."""

    async def body() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(body())
