"""Streams over a real server with its accounts: many viewers, one of them stalled."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from services.nodeagent.tests.pretended_node import record

from virtbus.bus.client.connection import connect
from virtbus.bus.client.flow_control import WINDOW_BYTES
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.streams import ByteStream, opening
from virtbus.bus.provisioning import server
from virtbus.nodeagent.core.scrollback import ROOM_BYTES
from virtbus.nodeagent.edge.console import FELL_BEHIND, Consoles
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.schemas.streams import ConsoleOpen
from virtbus.schemas.subjects import rpc

pytestmark = pytest.mark.integration

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
CONSOLE = rpc("n1", "agent", "console")
BLOCK = 64 * 1024


class Serial:
    """QEMU's end of a console: a UNIX socket for one client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attached = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.attached.set()
        await reader.read()
        writer.close()

    async def write(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)
        await self.writer.drain()

    def stop(self) -> None:
        assert self.writer is not None
        self.writer.close()


class Reader:
    """A viewer that reads; its input as a digest and a length."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self.closed = ""

    async def read(self, stream: ByteStream, progress: asyncio.Event) -> None:
        while data := await stream.read():
            self.digest.update(data)
            self.size += len(data)
            progress.set()
        self.closed = stream.closed


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[server.Server]:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with server.running(files, nodes=["n1"], port=-1) as running:
        yield running


@pytest.fixture
async def serial(nats: server.Server) -> AsyncIterator[Serial]:
    """A guest's port, and the agent that offers it on the bus."""
    with tempfile.TemporaryDirectory(prefix="vb-") as name:  # short: socket paths end at 107
        made = Serial(Path(name) / "console.sock")
        consoles = Consoles(lambda _uid: made.path, lambda _uid: Path(name) / "console.log")
        async with (
            await asyncio.start_unix_server(made.serve, made.path),
            connect(nats.settings("node-n1"), name="n1") as node,
            AgentRpc(node, "n1", consoles).serve(
                {UID: cast("VmActor", SimpleNamespace(vm=SimpleNamespace(record=record())))}
            ),
        ):
            yield made


async def view(stack: AsyncExitStack, nats: server.Server) -> ByteStream:
    """A viewer with a connection of its own."""
    bus: NatsBus = await stack.enter_async_context(connect(nats.settings("client"), name="viewer"))
    want = ConsoleOpen(uid=UID, write=False)
    return await stack.enter_async_context(opening(bus, CONSOLE, want))


async def test_ten_viewers_one_of_them_stalled_nine_see_every_byte(
    nats: server.Server, serial: Serial
) -> None:
    readers = [Reader() for _ in range(9)]
    written, said = 0, hashlib.sha256()
    progress = asyncio.Event()
    async with AsyncExitStack() as stack:
        stalled = await view(stack, nats)
        streams = [await view(stack, nats) for _ in readers]
        await serial.attached.wait()
        async with asyncio.TaskGroup() as group:
            for reader, stream in zip(readers, streams, strict=True):
                group.create_task(reader.read(stream, progress))
            while written < ROOM_BYTES + ROOM_BYTES // 2:
                block = hashlib.sha256(b"%d" % written).digest() * (BLOCK // 32)
                said.update(block)
                await serial.write(block)
                written += BLOCK
                # a real port gives its readers seconds for a full buffer
                while min(reader.size for reader in readers) < written - ROOM_BYTES // 4:
                    progress.clear()
                    await progress.wait()
            serial.stop()
        for reader in readers:
            assert (reader.size, reader.closed) == (written, "the guest stopped")
            assert reader.digest.digest() == said.digest()
        left = Reader()
        await left.read(stalled, progress)
        assert 0 < left.size <= WINDOW_BYTES + BLOCK
        assert left.closed == FELL_BEHIND


async def test_cutting_a_viewers_connection_ends_only_that_viewer(
    nats: server.Server, serial: Serial
) -> None:
    async with AsyncExitStack() as stack, AsyncExitStack() as cut:
        eviction_blocked_reason = await view(stack, nats)
        await view(cut, nats)
        await serial.attached.wait()
        await cut.aclose()
        await serial.write(b"still here")
        assert await eviction_blocked_reason.read() == b"still here"
        assert not eviction_blocked_reason.closed
