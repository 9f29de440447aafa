"""Pictures of displays are held in the agent's memory: few at once, and for a short time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import ServiceInfo
from virtbus.bus.client.streams import opening
from virtbus.nodeagent import streams
from virtbus.nodeagent.core.ports import Console
from virtbus.nodeagent.streams import GuestStreams, Streams
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import StreamOpen
from virtbus.schemas.subjects import rpc

SUBJECT = rpc("n1", "agent", "screenshot")
WANT = StreamOpen(uid="0192f0c1-2d3e-7abc-8def-0123456789ab")
PICTURE = bytes(1024 * 1024)


class Painted:
    async def screenshot(self, uid: str) -> bytes:
        assert uid == WANT.uid
        return PICTURE


@pytest.fixture
async def client() -> AsyncIterator[MemoryBus]:
    server = MemoryServer()
    node = MemoryBus(server, "n1")
    served = Streams(
        node,
        "n1",
        cast("Console", None),
        cast("GuestStreams", Painted()),
        lambda _uid: (),
        check_here=lambda _uid, _account: None,
    )
    info = ServiceInfo("agent", "0", "agent")
    async with asyncio.timeout(20), node.serve(info, served.endpoints()):
        yield MemoryBus(server, "client")


async def taken(stream: Any) -> bytes:
    found = b""
    while data := await stream.read():
        found += data
    return found


async def test_for_clients_that_read_nothing_the_agent_holds_few_pictures(
    client: MemoryBus,
) -> None:
    async with AsyncExitStack() as stalled:
        for _ in range(streams.SCREENSHOTS_AT_ONCE):
            await stalled.enter_async_context(opening(client, SUBJECT, WANT))
        with pytest.raises(VirtbusError) as refused:
            await stalled.enter_async_context(opening(client, SUBJECT, WANT))
        assert refused.value.code == Code.EXHAUSTED


async def test_a_picture_that_nobody_reads_is_dropped_with_the_reason(
    client: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PICTURE_S", 0.05)
    async with opening(client, SUBJECT, WANT) as stream:
        while not stream.closed:
            await asyncio.sleep(0.01)
        assert "ask for it again" in stream.closed
        assert len(await taken(stream)) < len(PICTURE)


async def test_a_picture_that_is_read_arrives_complete(client: MemoryBus) -> None:
    async with opening(client, SUBJECT, WANT) as stream:
        assert await taken(stream) == PICTURE
        assert stream.closed == streams.END_OF_PICTURE
