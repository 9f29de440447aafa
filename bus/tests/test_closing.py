"""The socket of a connection is closed after any failure."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from virtbus.bus.client.connection import NatsLink
from virtbus.bus.client.nats_client import shut
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import background

INFO = {"server_id": "x", "version": "2.12.0", "proto": 1, "headers": True, "max_payload": 1 << 20}


@dataclass
class _Wire:
    """The other end of the connection to a server that may greet, and then reads nothing."""

    greets: bool
    came: asyncio.Event = field(default_factory=asyncio.Event)
    look: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.greets:
            writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
            for _ in range(2):  # the greeting's, and that of the first subscription
                await reader.readuntil(b"PING\r\n")
                writer.write(b"PONG\r\n")
        self.came.set()
        with closing(writer), suppress(ConnectionResetError):
            await self.look.wait()
            while await reader.read(1 << 20):
                pass
        self.ended.set()

    async def is_closed(self) -> bool:
        self.look.set()
        return await self.ended.wait()


@asynccontextmanager
async def _wired(*, greets: bool) -> AsyncIterator[tuple[_Wire, NatsLink]]:
    wire = _Wire(greets)
    async with await asyncio.start_server(wire.serve, "127.0.0.1", 0) as listening:
        url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield wire, NatsLink(BusSettings(url=url), "c")


def _transport(link: NatsLink) -> asyncio.Transport:
    client: Any = link._client
    transport: asyncio.Transport = client._transport._bare_io_writer.transport
    return transport


async def test_a_connection_abandoned_while_connecting_is_closed() -> None:
    async with _wired(greets=False) as (wire, link):
        async with background() as tasks:
            tasks.start(link.first())
            await wire.came.wait()
        assert await wire.is_closed()


async def test_a_connection_whose_server_reads_nothing_is_closed() -> None:
    async with _wired(greets=True) as (_, link):
        await link.first()
        transport = _transport(link)
        async with background() as tasks:
            tasks.start(link.run())
            while not transport.get_write_buffer_size():
                await link.send("virtbus.report.x", bytes(1 << 19))
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # asyncio closes it in the loop's next turn
        assert transport.get_extra_info("socket").fileno() == -1


async def test_a_connection_that_ended_after_it_was_closed_with_unsent_data_is_shut() -> None:
    ended = asyncio.Event()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionResetError):
            await reader.read()
        ended.set()

    async with await asyncio.start_server(read_all, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)

        async def close() -> None:
            writer.write(bytes(8 << 20))
            writer.close()
            await writer.wait_closed()

        client: Any = SimpleNamespace(
            close=close, _transport=SimpleNamespace(_bare_io_writer=writer)
        )
        await shut(client, 5)
        await ended.wait()
    assert writer.is_closing()


def test_a_connection_whose_transport_uvloop_has_closed_is_shut() -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def check() -> None:
        async with await asyncio.start_server(reset, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port)

            async def close() -> None:
                writer.writelines([b"unsent"])
                with suppress(ConnectionResetError):
                    await writer.drain()

            async def until_closed() -> None:
                while True:
                    await close()

            with pytest.raises(RuntimeError, match="closed"):
                await until_closed()
            client: Any = SimpleNamespace(
                close=close, _transport=SimpleNamespace(_bare_io_writer=writer)
            )
            await shut(client, 5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())
