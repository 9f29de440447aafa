"""Idle connections hold a bounded share of the port for a bounded time."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.kubernetes.certificates import Authority

from virtbus.kubebridge.edge.web import tls as doors
from virtbus.kubebridge.edge.web.connections import Connections
from virtbus.kubebridge.edge.web.tls import TlsListener, serving


class Port:
    """The port and its clients."""

    def __init__(self, authority: Authority, port: int) -> None:
        self.context = ssl.create_default_context(cafile=str(authority.certificate))
        self.url = f"https://localhost:{port}"
        self.writers: list[asyncio.StreamWriter] = []
        self._port = port

    async def ask(self, source: str) -> str:
        connector = aiohttp.TCPConnector(ssl=self.context, local_addr=(source, 0))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(self.url) as answer,
        ):
            return await answer.text()

    async def idle(self, source: str, *, greets: bool = True) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self._port,
            local_addr=(source, 0),
            ssl=self.context if greets else None,
            server_hostname="localhost" if greets else None,
        )
        self.writers.append(writer)
        return reader


@pytest.fixture
async def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    def few(make: object, context: ssl.SSLContext) -> Connections:
        return Connections(make, context, most=16, first_s=0.3)  # type: ignore[arg-type]

    monkeypatch.setattr(doors, "Connections", few)

    async def caller(request: web.Request) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))

    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="hello")

    door, app, authority = TlsListener(), web.Application(), Authority(tmp_path, "one")
    app.add_routes([web.get("/", hello), web.get("/caller", caller)])
    door.show(*authority.sign("one", "one", hosts=["localhost"]))
    async with asyncio.timeout(30), serving(app, "127.0.0.1", 0, door) as (_, number):
        made = Port(authority, number)
        yield made
        for writer in made.writers:
            writer.transport.abort()


@pytest.mark.parametrize("greets", [True, False])
async def test_idle_connections_leave_room_for_other_sources(port: Port, *, greets: bool) -> None:
    refused = 0
    for _ in range(20):
        try:
            await port.idle("127.0.0.2", greets=greets)
        except OSError:
            refused += 1
    assert await port.ask("127.0.0.3") == "hello"
    assert refused > 0 or not greets


async def test_a_connection_without_a_request_is_closed(port: Port) -> None:
    idle = [await port.idle("127.0.0.2") for _ in range(12)]
    await asyncio.sleep(0.4)
    assert await port.ask("127.0.0.3") == "hello"
    for reader in idle:
        assert await _ended(reader)
    assert await port.ask("127.0.0.2") == "hello"


async def test_a_connection_may_be_idle_after_a_request(port: Port) -> None:
    connector, callers = aiohttp.TCPConnector(ssl=port.context), set[str]()
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(2):
            async with session.get(f"{port.url}/caller") as answer:
                callers.add(await answer.text())
            await asyncio.sleep(0.4)
            assert await port.ask("127.0.0.3") == "hello"  # this closes idle connections
    assert len(callers) == 1, "both came on one connection"


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except OSError:
        return True
