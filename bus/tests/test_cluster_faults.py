"""A bus that loses leaders, its majority or its power keeps every acknowledged write."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bus.tests.test_cluster import declare
from bus.tests.three_servers import ThreeServers, three_servers

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry
from virtbus.bus.errors import BusError, ConflictError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import server, stream_setup

pytestmark = pytest.mark.integration

ELECTIONS = 8
WRITE_S = 5.0
"""The time-out of a write; F15's bound."""


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[ThreeServers]:
    async with three_servers(tmp_path) as found:
        await declare(found)
        yield found


def _key(number: int) -> str:
    return f"$KV.vm.n1.01900000-0000-7000-8000-{number:012d}"


async def _claim(bus: NatsBus, number: int) -> None:
    """Make a key once; an attempt whose answer was lost is found by the next."""
    while True:
        try:
            await bus.put(_key(number), b"x", expect=0)
        except ConflictError:
            assert await _read(bus, number) is not None
            return
        except (UnavailableError, OutcomeUnknownError):
            await asyncio.sleep(0.05)
        else:
            return


async def _read(bus: NatsBus, number: int) -> Entry | None:
    """Return the value of a key, retried until there is a leader: an election outlasts one read."""
    while True:
        try:
            return await bus.get(_key(number))
        except (UnavailableError, OutcomeUnknownError):
            await asyncio.sleep(0.05)


async def test_nothing_acknowledged_is_lost_or_doubled_while_the_leader_changes(
    three: ThreeServers,
) -> None:
    over = asyncio.Event()
    written: list[int] = []
    async with (
        connect(three.settings("controller"), name="c") as bus,
        connect(three.settings("admin"), name="a") as admin,
    ):

        async def write() -> None:
            while not over.is_set():
                await _claim(bus, len(written))
                written.append(len(written))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for _ in range(ELECTIONS):
                await asyncio.sleep(0.5)
                try:
                    await admin.js_api("STREAM.LEADER.STEPDOWN.KV_vm", {})
                except BusError:
                    continue  # there is no leader at the moment
            over.set()
        before = len(written)
        await _claim(bus, before)
        info = await admin.js_api("STREAM.INFO.KV_vm")
        nonces = 2
        assert before > ELECTIONS
        assert info["state"]["num_subjects"] == before + 1 + nonces
        assert info["state"]["messages"] == before + 1 + nonces


async def test_without_a_majority_a_write_ends_in_time_and_works_once_it_is_back(
    three: ThreeServers,
) -> None:
    loop = asyncio.get_running_loop()
    async with connect(three.settings("controller"), name="c") as bus:
        await bus.put(_key(1), b"x")
        for number in (1, 2):
            await three.servers[number].kill()
        for _ in range(2):
            begun = loop.time()
            with pytest.raises((UnavailableError, OutcomeUnknownError)):
                await bus.put(_key(2), b"x")
            assert loop.time() - begun < WRITE_S + 2
        for number in (1, 2):
            await three.restart(number)
        async with asyncio.timeout(30):
            await _claim(bus, 2)
            assert await _read(bus, 1) is not None


async def test_every_acknowledged_write_was_synced_to_the_disk_before(
    nats: server.Server, tmp_path: Path
) -> None:
    """A power cut therefore loses no acknowledged write (F17)."""
    trace = tmp_path / "trace"
    async with connect(nats.settings("admin"), name="c") as bus:
        await stream_setup.ensure(bus)
        await bus.put(_key(1), b"first")
        strace = await asyncio.create_subprocess_exec(
            *("strace", "-f", "-y", "-s", "1000", "-o", str(trace), "-p", str(nats.pid)),
            *("-e", "trace=pwrite64,fsync,fdatasync,write,writev,sendto,sendmsg"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert strace.stderr is not None
        try:
            async with asyncio.timeout(10):
                while b"attached" not in await strace.stderr.readline():
                    pass
            await bus.put(_key(1), b"canary")
        finally:
            strace.send_signal(signal.SIGINT)
            await strace.communicate()
    text = trace.read_text()
    stored = re.search(r"KV_vm/msgs/1\.blk>.*canary", text)
    synced = re.search(r"f(?:data)?sync\(\d+<[^>]*KV_vm/msgs/1\.blk>", text)
    told = re.search(r"stream[^\n]{1,6}KV_vm[^\n]{1,8}seq", text)
    at = [found.start() if found else -1 for found in (stored, synced, told)]
    assert -1 < at[0] < at[1] < at[2], text
