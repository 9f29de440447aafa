"""Corrupt bytes that TCP's checksum missed never end a service (F22)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from typing import cast
from urllib.parse import urlsplit

import pytest
from nats.errors import ProtocolError

from virtbus.bus.client import connection
from virtbus.bus.client.connection import NatsLink
from virtbus.bus.client.link import Raw
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.nats_client import DirectClient
from virtbus.bus.client.ports import Entry, Watch, WatchMark
from virtbus.bus.client.records import Records
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning.server import Server

pytestmark = pytest.mark.integration

KEY = "$KV.vm.n1.01900000-0000-7000-8000-000000000001"


class _Garbling:
    """A link that changes a byte of an answer."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw

    async def up(self, timeout_s: float) -> None:
        del timeout_s

    async def ask(self, subject: str, body: bytes, **more: object) -> Raw:
        del subject, body, more
        return self._raw


async def _first_two(watch: Watch) -> AsyncIterator[Entry | WatchMark]:
    count = 0
    async for item in watch:
        yield item
        count += 1
        if count == 2:
            return


@pytest.mark.parametrize("body", [b'{"sequ":1}', b'{"seq":null}', b'{"seq":"x1"}'])
async def test_write_whose_answer_is_garbled_has_an_unknown_outcome(
    nats: Server, body: bytes
) -> None:
    records = Records(_Garbling(Raw("x", body)), nats.settings("controller").resolved())  # type: ignore[arg-type]  # two methods are enough
    with pytest.raises(OutcomeUnknownError):
        await records.put(KEY, b"x")


async def test_a_read_with_a_corrupt_answer_is_repeated(nats: Server) -> None:
    raw = Raw("x", b"", headers={"Nats-Sequence": "1\x5a"})
    records = Records(_Garbling(raw), nats.settings("node-n1").resolved())  # type: ignore[arg-type]  # two methods are enough
    with pytest.raises(UnavailableError):
        await records.get(KEY)


async def test_garbled_message_of_a_watch_makes_it_list_again(
    nats: Server, controller: NatsBus
) -> None:
    await controller.put(KEY, b"x")
    async with (
        connection.connect(nats.settings("controller"), name="w") as bus,
        bus.watch("$KV.vm.>") as watch,
        asyncio.timeout(20),
    ):
        async for item in watch:
            if item is WatchMark.SYNCED:
                break
        watch._raws.put(Raw(KEY, b"x", reply="$JS.ACK.KV_vm.w\x5a1.x"))  # type: ignore[attr-defined]  # as the link hands it over
        seen = [item async for item in _first_two(watch)]
    assert seen[0] is WatchMark.RESET
    assert isinstance(seen[1], Entry)


@asynccontextmanager
async def _garbled_greeting(server: Server) -> AsyncIterator[str]:
    """Return the URL of a link to the server that corrupts the very first PONG."""
    first = [True]

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(65536):
                if first[0] and b"PONG" in data:
                    first[0] = False
                    data = data.replace(b"PONG", b"P\x0fNG", 1)
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = urlsplit(server.url).port
        with closing(writer), suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            with closing(back):
                async with asyncio.TaskGroup() as group:
                    group.create_task(pump(reader, back))
                    group.create_task(pump(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def test_connection_whose_greeting_was_garbled_is_made_again(nats: Server) -> None:
    async with _garbled_greeting(nats) as url:
        settings = replace(nats.settings("controller"), url=url)
        async with connection.connect(settings, name="c") as bus:
            await bus.put(KEY, b"x")
            assert bus._link.generation == 1  # the corrupt one never counted


@pytest.mark.parametrize("task", ["_reading_task", "_flusher_task", "_ping_interval_task"])
async def test_connection_that_lost_a_task_of_its_client_is_made_again(
    nats: Server, task: str
) -> None:
    async with connection.connect(nats.settings("controller"), name="c") as bus:
        link = cast("NatsLink", bus._link)
        getattr(link._client, task).cancel()
        async with asyncio.timeout(10):
            while link.generation < 2:
                await asyncio.sleep(0.05)
            assert await bus.put(KEY, b"x") > 0


@pytest.mark.parametrize("line", [b"-ERR 'a\xff'", b'INFO {"a":\xff}', b"INFO {1", b"PO\x0fG"])
async def test_corrupt_line_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await DirectClient()._ps.parse(line + b"\r\n")
