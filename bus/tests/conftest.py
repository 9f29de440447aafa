"""The buses of a contract test, and real servers on free ports."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Bus
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.runtime.bus_settings import BusSettings

Connect = Callable[[str], AbstractAsyncContextManager[Bus]]
"""A connection under a name; all connections of one test share the server."""

NONCE = b"nonce-1"


@pytest.fixture
def files(tmp_path: Path) -> server.ServerFiles:
    return server.ServerFiles(tmp_path / "state", tmp_path / "run")


@asynccontextmanager
async def declared(files: server.ServerFiles, *, port: int = -1) -> AsyncIterator[server.Server]:
    """A real server with everything declared and the nodes n1 and n2 joined."""
    async with server.running(files, nodes=["n1", "n2"], port=port) as running:
        async with connect(running.settings("admin"), name="admin") as admin:
            await stream_setup.ensure(admin)
            for node in ("n1", "n2"):
                await stream_setup.ensure_node(admin, node, NONCE)
        yield running


@pytest.fixture
async def nats(files: server.ServerFiles) -> AsyncIterator[server.Server]:
    async with declared(files) as running:
        yield running


@pytest.fixture
async def controller(nats: server.Server) -> AsyncIterator[NatsBus]:
    async with connect(nats.settings("controller"), name="controller") as bus:
        yield bus


@pytest.fixture
async def node(nats: server.Server) -> AsyncIterator[NatsBus]:
    async with connect(nats.settings("node-n1"), name="n1") as bus:
        yield bus


@pytest.fixture(
    params=["memory", pytest.param("nats", marks=pytest.mark.integration)],
)
async def joined(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Make connections, by name, to one bus: the fake's, or a real server's as controller."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            shared = MemoryServer()

            @asynccontextmanager
            async def join_memory(name: str) -> AsyncIterator[Bus]:
                bus = MemoryBus(shared, name)
                try:
                    yield bus
                finally:
                    await bus.aclose()

            yield join_memory
            return
        files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
        running = await stack.enter_async_context(declared(files))
        settings = BusSettings(creds=files.creds("controller"))
        assert json.loads(files.creds("controller").read_text())["url"] == running.url

        @asynccontextmanager
        async def join(name: str) -> AsyncIterator[Bus]:
            async with connect(settings, name=name) as bus:
                yield bus

        yield join


@pytest.fixture
async def bus(joined: Connect) -> AsyncIterator[Bus]:
    async with joined("first") as first:
        yield first


@pytest.fixture
async def other(joined: Connect) -> AsyncIterator[Bus]:
    async with joined("second") as second:
        yield second
