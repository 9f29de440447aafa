"""A node that stores endlessly: events and statuses of others keep their share (H7)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from bus.tests.strangers import UID, Stranger, stranger

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning import server, stream_setup
from virtbus.controller.core.stream_shares import excess, limit
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.stream_trimmer import StreamTrimmer
from virtbus.schemas import subjects

MIB = 2**20
SIZES = stream_setup.Sizes(st=64 * MIB, evt=64 * MIB)
BODY = b"x" * 40_000


def test_a_node_gets_its_share_and_the_unused_rest() -> None:
    assert [limit(1600, nodes) for nodes in (1, 2, 8, 16, 64, 1000)] == [
        *(800, 800, 800),
        *(400, 100, 100),
    ]


def test_a_node_above_its_limit_is_named_with_the_remaining_share() -> None:
    small = [(f"virtbus.evt.n{number % 100}.u.k", 500) for number in range(100)]
    large = [("virtbus.evt.thief.u.k", 40_000)] * 10
    (found,) = excess([*small, *large], 1000 * MIB, 1024 * MIB, 110_000, nodes=101)
    assert found.node == "thief"
    assert found.bytes > 800 * MIB
    assert 0 < found.keep < 1000
    assert excess(small, 1000 * MIB, 1024 * MIB, 100_000, nodes=100) == []


def test_the_only_node_may_fill_the_stream() -> None:
    own = [("virtbus.evt.n1.u.k", 500)] * 100
    assert excess(own, 1000 * MIB, 1024 * MIB, 100_000, nodes=1) == []
    assert excess([], 1000 * MIB, 1024 * MIB, 0, nodes=5) == []


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[server.Server]:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with server.running(files, nodes=["n1", "n2"], port=-1) as running:
        async with connect(running.settings("admin"), name="admin") as admin:
            await stream_setup.ensure(admin, sizes=SIZES)
        yield running


async def _flood(thief: Stranger, subject: str, mib: int) -> None:
    """Store this much, at 12 MiB/s at most: a fifth of the stream per second."""
    began_s = time.monotonic()
    for number in range(mib * MIB // len(BODY)):
        await thief.client.publish(subject.format(number), BODY)
        if number % 30 == 29:
            await thief.client.flush(timeout=60)
            ahead_s = number * len(BODY) / (12 * MIB) - (time.monotonic() - began_s)
            await asyncio.sleep(max(0.0, ahead_s))


async def _told(bus: NatsBus, number: int) -> float:
    """Put a status as an agent does, until it is stored; return the seconds."""
    key = subjects.vm_status("n2", UID[:-3] + f"{number:03d}")
    began_s = time.monotonic()
    for _ in range(100):
        with suppress(BusError):
            await bus.put(key, b"status" * (10 + number))
            return time.monotonic() - began_s
        await asyncio.sleep(0.1)
    msg = f"status {number} was not stored"
    raise AssertionError(msg)


def _holder() -> LeaderTerm:
    return LeaderTerm("fleet", 1, float("inf"))


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_statuses_of_another_node_are_stored_while_one_floods(nats: server.Server) -> None:
    async with (
        stranger(nats, "node-n1") as thief,
        connect(nats.settings("node-n2"), name="n2") as victim,
        connect(nats.settings("controller"), name="controller") as controller,
        asyncio.TaskGroup() as group,
    ):
        duty = group.create_task(
            StreamTrimmer(controller, FleetEvents(controller), lambda: 2).run(_holder())
        )
        flood = group.create_task(_flood(thief, "$KV.st.n1.flood-{}", 150))
        took_s = list[float]()
        while not flood.done():
            took_s.append(await _told(victim, len(took_s) % 1000))
            await asyncio.sleep(0.1)
        duty.cancel()
        assert max(took_s) < 10
        assert await controller.get(subjects.vm_status("n2", UID[:-3] + "000")) is not None
        assert await controller.fill("st") < 0.9


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_history_of_others_outlives_a_flood_of_facts(nats: server.Server) -> None:
    async with (
        stranger(nats, "node-n1") as thief,
        connect(nats.settings("node-n2"), name="n2") as victim,
        connect(nats.settings("controller"), name="controller") as controller,
        asyncio.TaskGroup() as group,
    ):
        for number in range(200):
            victim.emit(f"virtbus.evt.n2.{UID}.x", {"n": number}, message_id=str(number))
        duty = group.create_task(
            StreamTrimmer(controller, FleetEvents(controller), lambda: 2).run(_holder())
        )
        await _flood(thief, "virtbus.evt.n1.u{}.x", 150)
        duty.cancel()
        assert len(await controller.history(subjects.events(UID))) == 200
        assert (await controller.extent("virtbus.evt.>")).last > 3000
        assert await controller.history("virtbus.evt.n1._.node.trimmed")


@pytest.mark.integration
async def test_a_nodes_statuses_have_one_token_and_a_bounded_size(nats: server.Server) -> None:
    async with stranger(nats, "node-n1") as thief:
        assert await thief.publish_all(["$KV.st.n1", "$KV.st.n1.a.b", "$KV.st.n2.a"]) == []
        assert await thief.publish_all([f"$KV.st.n1.{UID}"]) == [f"$KV.st.n1.{UID}"]
