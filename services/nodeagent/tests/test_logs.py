"""Console logs over the bus: followers of a silent guest, and followers that leave."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.pretended_node import record

from virtbus.bus.client import streams
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.schemas import subjects
from virtbus.schemas.streams import LogsRead

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
SUBJECT = subjects.rpc("n1", "agent", "logs")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[MemoryBus]:
    """A client of an agent that has one VM, whose log is `tmp_path/log`."""
    server = MemoryServer()
    consoles = Consoles(lambda _uid: tmp_path / "socket", lambda _uid: tmp_path / "log")
    agent = AgentRpc(MemoryBus(server, "agent"), "n1", consoles)
    async with agent.serve(
        {UID: cast("VmActor", SimpleNamespace(vm=SimpleNamespace(record=record())))}
    ):
        yield MemoryBus(server, "test")


async def test_a_follower_of_a_silent_guest_is_answered_at_once(
    client: MemoryBus, tmp_path: Path
) -> None:
    want = LogsRead(uid=UID, follow=True)
    async with client.request_stream(SUBJECT, want, idle_timeout_s=5) as answers:
        first = await anext(answers)
        assert first["input_subject"].startswith(f"{SUBJECT}.")
        (tmp_path / "log").write_bytes(b"boot")
        assert (await anext(answers))["data"] == b"boot"


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "goes silent"])
async def test_a_follower_that_left_is_disconnected(
    client: MemoryBus, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 30.0 if leaves else 0.2)
    want = LogsRead(uid=UID, follow=True)
    async with client.request_stream(SUBJECT, want, idle_timeout_s=5) as answers:
        first: Any = await anext(answers)
        if leaves:
            await client.publish(first["input_subject"], {"closed": "detached"})
        async with asyncio.timeout(5):
            assert (await anext(answers))["closed"] == ("detached" if leaves else streams.SILENT)


async def test_a_follower_with_keep_alives_stays_connected(
    client: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 0.5)
    want = LogsRead(uid=UID, follow=True)
    async with client.request_stream(SUBJECT, want, idle_timeout_s=5) as answers:
        subject = (await anext(answers))["input_subject"]
        for _ in range(8):
            await asyncio.sleep(0.1)
            await client.publish(subject, {"data": b""})
        (tmp_path / "log").write_bytes(b"boot")
        assert (await anext(answers))["data"] == b"boot"
