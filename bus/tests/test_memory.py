"""Features of the fake beyond the contract: its clock and its explicit faults."""

import pytest

from virtbus.bus.client.memory_bus import Fault, MemoryBus, MemoryServer
from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import ConflictError, FullError, OutcomeUnknownError, UnavailableError

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = f"$KV.vm.n1.{UID}"


class Clock:
    """Nanoseconds that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> MemoryServer:
    return MemoryServer(clock)


@pytest.fixture
def bus(server: MemoryServer) -> MemoryBus:
    return MemoryBus(server)


def test_the_memory_bus_implements_the_bus(bus: MemoryBus) -> None:
    typed: Bus = bus
    assert typed.connected


async def test_liveness_expires_by_the_given_clock(
    bus: MemoryBus, server: MemoryServer, clock: Clock
) -> None:
    await bus.put("$KV.node.n1", b"alive", ttl_s=15)
    clock.advance(14)
    server.expire()
    assert (entry := await bus.get("$KV.node.n1")) is not None
    assert entry.kind is EntryKind.PUT
    clock.advance(2)
    server.expire()
    assert await bus.get("$KV.node.n1") is None


async def test_a_lease_expires_into_a_marker(
    bus: MemoryBus, server: MemoryServer, clock: Clock
) -> None:
    await bus.put("$KV.lease.gc", b"held", ttl_s=15)
    clock.advance(16)
    server.expire()
    assert (entry := await bus.get("$KV.lease.gc")) is not None
    assert entry.kind is EntryKind.PURGE
    clock.advance(61)
    server.expire()
    assert await bus.get("$KV.lease.gc") is None


async def test_a_renewed_key_lives_on(bus: MemoryBus, server: MemoryServer, clock: Clock) -> None:
    for _ in range(4):
        await bus.put("$KV.node.n1", b"alive", ttl_s=15)
        clock.advance(10)
        server.expire()
    assert (entry := await bus.get("$KV.node.n1")) is not None
    assert entry.kind is EntryKind.PUT


async def test_a_purge_marker_ends_without_another(
    bus: MemoryBus, server: MemoryServer, clock: Clock
) -> None:
    await bus.put(KEY, b"x")
    await bus.purge(KEY, marker_ttl_s=86_400)
    clock.advance(86_401)
    server.expire()
    assert await bus.get(KEY) is None
    await bus.put(KEY, b"again", expect=0)


async def test_writes_fail_as_configured(bus: MemoryBus) -> None:
    bus.faults.extend([Fault.UNAVAILABLE, Fault.LOST, Fault.STORED])
    with pytest.raises(UnavailableError):
        await bus.put(KEY, b"1", expect=0)
    with pytest.raises(OutcomeUnknownError):
        await bus.put(KEY, b"2", expect=0)
    assert await bus.get(KEY) is None
    with pytest.raises(OutcomeUnknownError):
        await bus.put(KEY, b"3", expect=0)
    assert (entry := await bus.get(KEY)) is not None
    assert entry.value == b"3"
    with pytest.raises(ConflictError):
        await bus.put(KEY, b"4", expect=0)


async def test_a_watch_lists_again_after_the_connection_was_cut(
    bus: MemoryBus, server: MemoryServer
) -> None:
    other = MemoryBus(server)
    async with bus.watch("$KV.vm.>") as watch:
        items = aiter(watch)
        assert [await anext(items), await anext(items)] == [WatchMark.RESET, WatchMark.SYNCED]
        bus.disconnect()
        await other.put(KEY, b"missed")
        with pytest.raises(UnavailableError):
            await bus.get(KEY)
        bus.reconnect()
        assert await anext(items) is WatchMark.RESET
        entry = await anext(items)
        assert isinstance(entry, Entry)
        assert entry.value == b"missed"
        assert await anext(items) is WatchMark.SYNCED


async def test_core_messages_are_dropped_on_request_of_the_test(
    bus: MemoryBus, server: MemoryServer
) -> None:
    async with bus.subscribe("virtbus.node.n1.ready.>") as messages:
        server.drop = lambda subject: subject.endswith(".image")
        await bus.publish(f"virtbus.node.n1.ready.{UID}.image", {})
        await bus.publish(f"virtbus.node.n1.ready.{UID}.net", {})
        message = await anext(aiter(messages))
    assert message.subject.endswith(".net")


async def test_a_bucket_with_a_limit_is_full_but_takes_purges(
    bus: MemoryBus, server: MemoryServer
) -> None:
    server.shelf(KEY).max_bytes = 1000
    await bus.put(KEY, b"x" * 800)
    assert await bus.fill("vm") > 0.8
    with pytest.raises(FullError):
        await bus.put(f"$KV.vm.n2.{UID}", b"x" * 800)
    await bus.purge(KEY)
    await bus.put(f"$KV.vm.n2.{UID}", b"x" * 800)


async def test_publishing_without_a_connection_is_no_error(bus: MemoryBus) -> None:
    bus.disconnect()
    await bus.publish("virtbus.node.n1.report.agent", {})
    assert not bus.connected
