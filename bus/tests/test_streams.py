"""Streams over the bus: order, limits, ends; on the memory bus, which has the same contract."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from virtbus.bus.client import streams
from virtbus.bus.client.flow_control import (
    CHUNK_BYTES,
    BrokenStreamError,
    FlowControl,
)
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.streams import (
    INPUT_WINDOW_BYTES,
    ByteStream,
    StreamEndedError,
    accepting,
    carry,
    opening,
)
from virtbus.bus.runtime.tasks import background
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import StreamData, StreamOpen
from virtbus.schemas.subjects import rpc
from virtbus.schemas.wire import validate

SUBJECT = rpc("n1", "agent", "port")
WANT = StreamOpen(uid="0192f0c1-2d3e-7abc-8def-0123456789ab")
Serve = Callable[[ByteStream], Awaitable[None]]


@asynccontextmanager
async def served(
    serve: Serve, *, window: int = 256 * 1024, datagrams: bool = False
) -> AsyncIterator[tuple[MemoryBus, MemoryBus, ByteStream]]:
    """A client's end of a stream whose other end is with `serve`."""
    server = MemoryServer()
    service, client = MemoryBus(server, "service"), MemoryBus(server, "client")

    async def handle(request: Request) -> None:
        want = validate(StreamOpen, request.data)
        async with accepting(service, request, want, datagrams=datagrams) as stream:
            await serve(stream)

    info = ServiceInfo("test", "0", "test")
    async with (
        asyncio.timeout(10),
        service.serve(info, [Endpoint("port", SUBJECT, handle)]),
        opening(client, SUBJECT, WANT, window=window, datagrams=datagrams) as stream,
    ):
        yield service, client, stream


async def everything(stream: ByteStream) -> bytes:
    found = b""
    while data := await stream.read():
        found += data
    return found


async def echo(stream: ByteStream) -> None:
    while data := await stream.read():
        await stream.write(data)
    await stream.finish()
    stream.end("said all")


async def test_many_times_the_window_goes_through_both_ways_in_order() -> None:
    sent = bytes(range(256)) * 8 * 1024

    async def send(stream: ByteStream) -> None:
        await stream.write(sent)
        await stream.finish()

    async with served(echo, window=CHUNK_BYTES) as (_, _, stream):
        async with asyncio.TaskGroup() as group:
            group.create_task(send(stream))
            assert await everything(stream) == sent
        assert stream.closed == "said all"


async def test_a_stalled_reader_blocks_its_sender_at_the_window() -> None:
    written = 0

    async def flood(stream: ByteStream) -> None:
        nonlocal written
        while True:
            await stream.write(b"x" * 1000)
            written += 1000

    async with served(lambda s: s.while_open(flood(s)), window=50_000) as (_, _, stream):
        seen = -1
        while seen != written:
            seen = written
            for _ in range(20):
                await asyncio.sleep(0)
        assert written == 50_000
        assert len(await stream.read()) >= 1000
        while written == seen:
            await asyncio.sleep(0)


async def test_large_input_is_not_copied_again_for_each_piece() -> None:
    copied = 0

    class Counted(bytes):
        def __getitem__(self, which: Any) -> Any:
            nonlocal copied
            part = Counted(super().__getitem__(which))
            copied += len(part)
            return part

    async def say(_: StreamData) -> None:
        """Discard it."""

    flow = FlowControl(1)
    flow.limited(64 * CHUNK_BYTES)
    stream = ByteStream(say, flow)
    await stream.write(Counted(64 * CHUNK_BYTES))
    assert copied <= 64 * CHUNK_BYTES


async def test_many_small_pieces_cost_no_more_than_a_large_one() -> None:
    async def drip(stream: ByteStream) -> None:
        for _ in range(5000):
            await stream.write(b"x")
            await asyncio.sleep(0)  # as a connection would
        stream.end("done")

    async with served(drip) as (_, _, stream):
        while not stream.closed:
            await asyncio.sleep(0)
        assert len(stream._came) == 1  # nothing else shows the held messages
        assert await everything(stream) == b"x" * 5000


async def ended(service: ByteStream, told: "asyncio.Future[str]") -> None:
    await everything(service)
    told.set_result(service.closed)


async def test_a_client_that_leaves_ends_the_stream() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(lambda s: ended(s, told)) as (_, _, stream):
        await stream.write(b"last words")
    assert await told == "detached"


async def test_a_client_that_ends_the_stream_gives_the_reason() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(lambda s: ended(s, told)) as (_, _, stream):
        stream.end("enough")
    assert await told == "enough"


async def test_a_silent_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 0.2)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(lambda s: ended(s, told)) as (_, client, _):
        client.disconnect()
        assert await told == streams.SILENT


async def test_a_client_with_keep_alives_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 1.0)
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(lambda s: ended(s, told)) as (_, _, stream):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.shield(told)
        await stream.write(b"x")
    assert await told == "detached"


@pytest.mark.parametrize("unread", [b"", b"bytes"])
async def test_keep_alives_end_with_the_stream(
    monkeypatch: pytest.MonkeyPatch, unread: bytes
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    told: list[StreamData] = []

    async def tell(piece: StreamData) -> None:
        told.append(piece)

    async with asyncio.timeout(5), background() as tasks:
        for from_outside in (True, False):
            stream = ByteStream(tell, FlowControl(CHUNK_BYTES))
            alive = tasks.start(stream.send_keep_alives())
            while not told:
                await asyncio.sleep(0.01)
            stream.heard(StreamData(data=unread, closed="bye" if from_outside else ""))
            if not from_outside:
                stream.end("enough")
            told.clear()
            await alive
            assert told == []


async def test_a_lost_message_ends_the_stream_and_leaves_no_gap() -> None:
    async def say(stream: ByteStream) -> None:
        await stream.write(b"one")
        stream._flow.sending(3)  # lost on the way
        await stream.write(b"three")
        await stream.while_open(streams_end(stream))

    async with served(say) as (_, _, stream):
        assert await everything(stream) in {b"one", b""}
        assert "lost on the way" in stream.closed
        with pytest.raises(StreamEndedError, match="lost on the way"):
            await stream.write(b"x")


async def streams_end(stream: ByteStream) -> None:
    while not stream.closed:
        await stream.read()


async def test_a_client_that_exceeds_its_credit_is_ended_and_nothing_is_kept() -> None:
    ends: asyncio.Queue[ByteStream] = asyncio.Queue()

    async def hold(stream: ByteStream) -> None:
        ends.put_nowait(stream)
        while not stream.closed:
            await asyncio.sleep(0)

    async with served(hold) as (_, _, stream):
        stream._flow.limited(2 * INPUT_WINDOW_BYTES)  # more than was granted
        await stream.write(b"x" * (INPUT_WINDOW_BYTES + 1))
        theirs = await ends.get()
        while not theirs.closed:
            await asyncio.sleep(0)
        assert "does not keep to its limit" in theirs.closed
        assert not theirs._came


async def test_an_unreadable_message_ends_the_stream() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(lambda s: ended(s, told)) as (_, client, stream):
        assert "cannot be read" in await said(client, stream, {"at": -1}, told)


async def said(
    client: MemoryBus, stream: ByteStream, what: dict[str, Any], told: "asyncio.Future[str]"
) -> str:
    """Return the reason with which the service's end closes on an unexpected message."""
    cells = stream._tell.__closure__ or ()
    first = next(c.cell_contents for c in cells if isinstance(c.cell_contents, StreamData))
    await client.publish(first.input_subject, what)
    return await told


async def test_a_refusal_comes_out_as_it_is() -> None:
    server = MemoryServer()
    service, client = MemoryBus(server, "service"), MemoryBus(server, "client")

    async def refuse(_: Request) -> None:
        raise VirtbusError(Code.CONFLICT, "no_console", "the guest does not run")

    async with service.serve(ServiceInfo("t", "0", "t"), [Endpoint("port", SUBJECT, refuse)]):
        with pytest.raises(VirtbusError) as raised:
            async with opening(client, SUBJECT, WANT):
                pass
    assert raised.value.reason == "no_console"


async def test_datagrams_stay_whole_and_are_dropped_without_room() -> None:
    async def say(stream: ByteStream) -> None:
        await stream.write_datagram(b"a" * 600)
        await stream.write_datagram(b"b" * 600)  # no room
        await stream.write_datagram(b"c" * 400)
        stream.end("done")

    async with served(say, window=1000, datagrams=True) as (_, _, stream):
        assert await stream.read() == b"a" * 600
        assert await stream.read() == b"c" * 400
        assert await stream.read() == b""


async def test_a_connection_is_forwarded_with_its_half_close() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read()  # to the client's own end
        writer.write(asked.upper())
        await writer.drain()
        writer.close()

    target = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = target.sockets[0].getsockname()[1]

    async def connect(stream: ByteStream) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await carry(stream, reader, writer)
        finally:
            writer.close()

    async with target, served(connect) as (_, _, stream):
        await stream.write(b"hello")
        await stream.finish()
        assert await everything(stream) == b"HELLO"


def test_a_limit_that_comes_late_or_twice_does_no_harm() -> None:
    flow = FlowControl(100)
    flow.limited(50)
    flow.limited(20)
    assert flow.room == 50
    assert flow.sending(50) == 0
    assert flow.room == 0
    flow.limited(80)
    assert flow.room == 30


def test_a_limit_is_sent_when_half_the_window_was_read() -> None:
    flow = FlowControl(100)
    flow.came(0, 100)
    assert not flow.took(49)
    assert flow.took(1)
    assert flow.upto == 150
    flow.came(100, 50)
    with pytest.raises(BrokenStreamError, match="limit"):
        flow.came(150, 1)
