"""imaged and netd work on the host whose agent holds the node, and on no other."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from virtbus.bus.client import connection, local_agent
from virtbus.bus.client.local_agent import LocalAgent, serve_with_agent, word_in
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Bus, Gate, WatchMark
from virtbus.bus.errors import DeniedError, UnavailableError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.bus.runtime.tasks import Background, background
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.hosts import HostMarks, Instance
from virtbus.schemas.wire import encode


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("LOOK_S", 0.01),
        ("AGAIN_S", 0.01),
        ("SETTLES_S", 0.04),
        ("PROVE_S", 0.05),
    ):
        monkeypatch.setattr(local_agent, name, seconds)


@pytest.fixture
async def tasks() -> AsyncIterator[Background]:
    async with background() as group:
        yield group


async def holder(bus: MemoryBus, life: str) -> None:
    one = Instance(node="n1", instance=life, host=HostMarks(key="k"))
    await bus.put(subjects.node_instance("n1"), encode(one))


def says(run_dir: Path, text: str) -> None:
    (run_dir / "instance").write_text(text)


@pytest.mark.parametrize("word", ["", "held other\n", "refused\nit belongs to another host\n"])
async def test_it_waits_while_its_agent_does_not_hold_the_node(
    tasks: Background, tmp_path: Path, word: str
) -> None:
    bus = MemoryBus(MemoryServer())
    await holder(bus, "life")
    if word:
        says(tmp_path, word)
    agent = LocalAgent(bus, "n1", word_in(tmp_path))
    begun = tasks.start(agent.begin())
    await asyncio.sleep(0.1)
    assert not begun.done()
    says(tmp_path, "held life\n")
    async with asyncio.timeout(2):
        await begun


async def test_it_is_ready_once_its_agent_holds_the_node_or_is_missing_for_long(
    tasks: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`virtbus up` and systemd report a host as up by this."""
    words: list[str] = []
    monkeypatch.setattr(local_agent, "notify", words.append)
    monkeypatch.setattr(local_agent, "REPORT_AFTER_S", 0.3)
    bus = MemoryBus(MemoryServer())
    await holder(bus, "life")
    begun = tasks.start(LocalAgent(bus, "n1", word_in(tmp_path)).begin())
    await asyncio.sleep(0.1)
    assert words == []
    async with asyncio.timeout(5):
        while not words:
            await asyncio.sleep(0.01)
    assert words[0].startswith("READY=1")
    assert not begun.done()


async def test_no_list_is_delivered_before_the_gate(tasks: Background, tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    agent = LocalAgent(bus, "n1", word_in(tmp_path))
    async with bus.node_watch("n1", "imaged", agent.gate) as watch:
        seen: list[object] = []

        async def look() -> None:
            seen.append(await anext(aiter(watch)))

        first = tasks.start(look())
        await asyncio.sleep(0.1)
        assert not first.done()
        await holder(bus, "life")
        says(tmp_path, "held life\n")
        async with asyncio.timeout(2):
            await first
        assert seen == [WatchMark.RESET]


@pytest.mark.parametrize("how", ["its agent was refused", "the key is another life's"])
async def test_it_ends_once_another_host_holds_the_node(tmp_path: Path, how: str) -> None:
    bus = MemoryBus(MemoryServer())
    await holder(bus, "life")
    says(tmp_path, "held life\n")
    agent = LocalAgent(bus, "n1", word_in(tmp_path))
    await agent.begin()

    async def ended() -> None:
        with pytest.raises(VirtbusError, match="does not hold the node"):
            await agent.keep()

    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        kept = group.create_task(ended())
        await asyncio.sleep(0.15)
        assert not kept.done()
        if how == "its agent was refused":
            says(tmp_path, "refused\nwhy\n")
        else:
            await holder(bus, "other")


async def test_a_damaged_key_ends_nothing_and_the_agent_waits(
    tasks: Background, tmp_path: Path
) -> None:
    bus = MemoryBus(MemoryServer())
    await holder(bus, "life")
    says(tmp_path, "held life\n")
    agent = LocalAgent(bus, "n1", word_in(tmp_path))
    await agent.begin()
    kept = tasks.start(agent.keep())
    foreign = Instance(node="n2", instance="life", host=HostMarks(key="k"))
    for damaged in (b"\xc1", encode({"schema_version": 99}), encode(foreign)):
        await bus.put(subjects.node_instance("n1"), damaged)
        await asyncio.sleep(0.2)
        assert not kept.done()
    begun = tasks.start(agent.begin())
    await asyncio.sleep(0.1)
    assert not begun.done()
    await holder(bus, "life")  # its agent wrote it again
    async with asyncio.timeout(2):
        await begun
    kept.cancel()


async def test_a_restart_of_the_agent_ends_nothing(tasks: Background, tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    await holder(bus, "life")
    says(tmp_path, "held life\n")
    agent = LocalAgent(bus, "n1", word_in(tmp_path))
    await agent.begin()
    kept = tasks.start(agent.keep())
    for number in range(5):
        await holder(bus, f"life{number}")  # the key first, then the agent's file
        await asyncio.sleep(0.01)
        says(tmp_path, f"held life{number}\n")
        await asyncio.sleep(0.05)
    await bus.purge(subjects.node_instance("n1"))  # of a recreated bus
    await asyncio.sleep(0.2)
    assert not kept.done()
    kept.cancel()


class Unreachable(ServiceSettings):
    """Settings with a bus at which nobody listens."""

    service = "own"

    def bus(self) -> BusSettings:
        return BusSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.1)


async def test_only_a_service_that_guests_need_stays_while_the_bus_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    monkeypatch.setattr(local_agent, "notify", words.append)
    settings, needed = Unreachable(node="n1", state_dir=tmp_path), [True, True, False]

    async def serve(_bus: Bus, _gate: Gate) -> None:
        pytest.fail("there is no bus")

    with pytest.raises(UnavailableError):
        await serve_with_agent(settings, serve)
    assert words == []
    with pytest.raises(UnavailableError):
        await serve_with_agent(settings, serve, stays=lambda: needed.pop(0))
    assert words == ["READY=1\nSTATUS=waits for the bus"]


@pytest.mark.parametrize("needed", [True, False])
async def test_a_service_that_guests_need_also_stays_while_the_bus_refuses_its_login(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    needed: bool,
) -> None:
    """Guests do not suffer from a bus that was restored with other accounts."""
    refusals = iter([DeniedError("refused"), DeniedError("refused"), UnavailableError("away")])
    attempts: list[str] = []

    def connect(
        _settings: BusSettings, *, name: str
    ) -> contextlib.AbstractAsyncContextManager[Bus]:
        attempts.append(name)
        raise next(refusals)

    monkeypatch.setattr(connection, "connect", connect)
    settings = Unreachable(node="n1", state_dir=tmp_path)

    async def serve(_bus: Bus, _gate: Gate) -> None:
        pytest.fail("there is no bus")

    with pytest.raises(UnavailableError if needed else DeniedError):
        await serve_with_agent(settings, serve, stays=lambda: needed and len(attempts) < 3)
    assert len(attempts) == (3 if needed else 1)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said == (["waits for the bus: refused"] if needed else [])
