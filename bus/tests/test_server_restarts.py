"""The client survives a real server that is killed, hangs or comes back."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bus.tests.test_nats_server import INFO, KEY, SUBJECT, UID

from virtbus.bus.client import connection, probes
from virtbus.bus.client.connection import NatsLink, connect
from virtbus.bus.client.link import LinkLostError, Raw
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Endpoint, Entry, Request, WatchMark
from virtbus.bus.client.records import Records
from virtbus.bus.errors import BusError, ConflictError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import node_join, server, stream_setup
from virtbus.bus.runtime.tasks import background

pytestmark = pytest.mark.integration


async def restarted(running: server.Server) -> None:
    await running.stop()
    await running.start(server.binary(), running.port)


@pytest.mark.parametrize("kind", ["own", "node"])
async def test_a_watch_lists_again_after_a_server_restart(nats: server.Server, kind: str) -> None:
    user = "controller" if kind == "own" else "node-n1"
    async with (
        connect(nats.settings("controller"), name="c") as writer,
        background() as tasks,
        connect(nats.settings(user), name="w") as reader,
        reader.watch("$KV.vm.n1.>") if kind == "own" else reader.node_watch("n1", "agent") as watch,
    ):
        tasks.start(node_join.keep(writer, lambda: ["n1"]))
        await writer.put(KEY, b"before")
        items = aiter(watch)
        while await anext(items) is not WatchMark.SYNCED:
            pass
        await restarted(nats)
        async with asyncio.timeout(10):
            while await anext(items) is not WatchMark.RESET:
                pass
            listed = []
            while (item := await anext(items)) is not WatchMark.SYNCED:
                listed.append(item)
        assert b"before" in [item.value for item in listed if isinstance(item, Entry)]
        await writer.put(KEY, b"after")
        async with asyncio.timeout(10):
            item = await anext(items)
        assert isinstance(item, Entry)
        assert item.value == b"after"


async def test_a_killed_server_is_noticed_and_followed_again(
    nats: server.Server, controller: NatsBus
) -> None:
    async with controller.watch("$KV.st.>") as watch:
        items = aiter(watch)
        assert [await anext(items), await anext(items)] == [WatchMark.RESET, WatchMark.SYNCED]
        await nats.kill()
        await nats.start(server.binary(), nats.port)
        async with asyncio.timeout(10):
            assert [await anext(items), await anext(items)] == [WatchMark.RESET, WatchMark.SYNCED]


async def test_requests_and_writes_under_a_restart_end_done(
    nats: server.Server, controller: NatsBus
) -> None:
    """A restart in between takes time; a request whose answer was lost is repeated by id."""
    written: list[int] = []

    async def write(request: Request) -> Any:
        key = f"$KV.vm.n1.{UID[:-3]}{request.data['n']:03d}"
        try:
            revision = await controller.put(key, request.id.encode(), expect=0)
        except ConflictError:
            entry = await controller.get(key)
            assert entry is not None
            assert entry.value == request.id.encode()
            return entry.revision
        written.append(request.data["n"])
        return revision

    async def ask(client: NatsBus, number: int) -> None:
        assert await client.request(SUBJECT, {"n": number}, timeout_s=20) > 0

    async with (
        controller.serve(INFO, [Endpoint("get", SUBJECT, write)]),
        connect(nats.settings("client"), name="cli") as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(100):
            group.create_task(ask(client, number))
            if number == 50:
                group.create_task(restarted(nats))
            await asyncio.sleep(0.002)
    assert sorted(written) == list(range(100))


async def test_writes_while_the_server_is_away_are_unavailable_and_leave_no_ghost(
    nats: server.Server,
) -> None:
    settings = nats.settings("controller", write_timeout_s=0.3)
    async with connect(settings, name="c") as bus:
        await nats.stop()
        with pytest.raises(UnavailableError):
            await bus.put(KEY, b"ghost")
        await nats.start(server.binary(), nats.port)
        async with asyncio.timeout(10):
            while not bus.connected:
                await asyncio.sleep(0.01)
        assert await bus.get(KEY) is None


def stopped(pid: int) -> bool:
    """Return True if every thread has taken the SIGSTOP."""
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


async def test_a_write_to_a_server_that_hangs_has_an_unknown_outcome(nats: server.Server) -> None:
    settings = nats.settings("controller", write_timeout_s=1)
    async with connect(settings, name="c") as bus:
        await bus.put(KEY, b"one")
        os.kill(nats.pid, signal.SIGSTOP)
        while not stopped(nats.pid):
            await asyncio.sleep(0)
        try:
            with pytest.raises(OutcomeUnknownError):
                await bus.put(KEY, b"two")
        finally:
            os.kill(nats.pid, signal.SIGCONT)
        entry = await bus.get(KEY)
    assert entry is not None
    assert entry.value in {b"one", b"two"}


async def test_a_subscription_that_a_loss_interrupted_leaves_the_next_connection(
    nats: server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Raw] = []
    waiting, over = asyncio.Event(), asyncio.Event()

    async def flush(_timeout_s: float) -> None:
        waiting.set()
        await over.wait()
        raise TimeoutError

    async with (
        connect(nats.settings("controller"), name="c") as bus,
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
    ):
        monkeypatch.setattr(bus._link._client, "flush", flush)  # type: ignore[attr-defined]  # of the first connection only
        opening = group.create_task(bus._link.open("virtbus.report.x", heard.append))
        await waiting.wait()
        await nats.kill()
        await nats.start(server.binary(), nats.port)
        while bus._link.generation < 2:
            await asyncio.sleep(0.01)
        over.set()
        subscription = await opening
        await asyncio.sleep(connection.LOOK_S)
        assert bus._link.generation == 2
        await bus._link.send("virtbus.report.x", b"x")
        while not heard:
            await asyncio.sleep(0.01)
        await subscription.close()


async def test_changed_credentials_close_and_the_right_ones_bring_it_back(
    nats: server.Server, files: server.ServerFiles
) -> None:
    async with (
        connect(nats.settings("controller"), name="c") as bus,
        bus.watch("$KV.vm.n1.>") as watch,
    ):
        items = aiter(watch)
        while await anext(items) is not WatchMark.SYNCED:
            pass
        passwords = json.loads(files.passwords.read_text())
        passwords["controller"] = "another-one"
        files.passwords.write_text(json.dumps(passwords))
        await nats.rewrite()
        async with asyncio.timeout(15):
            while await anext(items) is not WatchMark.SYNCED:
                pass
        await bus.put(KEY, b"x")


async def test_each_reload_that_the_server_rejects_is_an_error(
    nats: server.Server, files: server.ServerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def logs_in(*_login: Any) -> bool:
        return False

    monkeypatch.setattr(server, "RELOAD_S", 0.1)
    monkeypatch.setattr(probes, "logs_in", logs_in)
    passwords = json.loads(files.passwords.read_text())
    files.passwords.write_text(json.dumps(passwords | {"controller": "another-one"}))
    for _attempt in range(2):
        with pytest.raises(BusError):
            await nats.rewrite()


async def test_the_memory_bucket_is_declared_again_after_a_restart(
    nats: server.Server, controller: NatsBus, node: NatsBus
) -> None:
    await node.put("$KV.node.n1", b"alive", ttl_s=15)
    async with background() as tasks:
        tasks.start(stream_setup.keep(controller))
        await restarted(nats)
        await node.put("$KV.node.n1", b"alive", ttl_s=15)
    entry = await controller.get("$KV.node.n1")
    assert entry is not None
    assert entry.value == b"alive"


async def test_a_write_repeated_after_a_lost_answer_succeeds(
    nats: server.Server,
) -> None:
    """The server compares before it deduplicates, so a naive repeat would get a conflict."""
    link = NatsLink(nats.settings("controller"), "c")
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        records = Records(LosesOneAnswer(link), nats.settings("controller"))
        revision = await records.put(KEY, b"x", expect=0)
        entry = await records.get(KEY)
        assert entry is not None
        assert entry.revision == revision


class LosesOneAnswer(NatsLink):
    """A link whose first answer never arrives."""

    def __init__(self, real: NatsLink) -> None:
        self._real = real
        self._lost_one = False

    async def up(self, timeout_s: float) -> None:
        await self._real.up(timeout_s)

    async def ask(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Raw:
        answer = await self._real.ask(subject, body, headers=headers, timeout_s=timeout_s)
        if not self._lost_one:
            self._lost_one = True
            raise LinkLostError("cut (test)")
        return answer


async def test_facts_emitted_while_the_server_is_away_are_stored_later(
    nats: server.Server, node: NatsBus, controller: NatsBus
) -> None:
    await nats.stop()
    for number in range(20):
        node.emit(f"virtbus.evt.n1.{UID}.vm.accepted", {"n": number}, message_id=f"f{number}")
    await nats.start(server.binary(), nats.port)
    async with asyncio.timeout(15):
        while True:
            try:
                if len(await controller.history("virtbus.evt.>")) == 20:
                    break
            except BusError:
                pass
            await asyncio.sleep(0.05)
    assert node.dropped_events == 0


@pytest.fixture
def default_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port from which a first start may move, free now."""
    port = probes.any_port("127.0.0.1")
    monkeypatch.setattr(server, "DEFAULT_PORT", port)
    return port


def listener(port: int) -> socket.socket:
    """Return another program's socket, which has the port."""
    return socket.create_server(("127.0.0.1", port))


async def test_only_a_first_start_moves_from_a_port_that_is_taken(
    files: server.ServerFiles, default_port: int
) -> None:
    with listener(default_port):
        async with server.running(files, port=default_port) as moved:
            assert moved.port not in {-1, default_port}
    async with server.running(files, port=default_port) as running:
        assert running.port == default_port
        await running.stop()
        with listener(default_port), pytest.raises(BusError, match=f"{default_port} is taken"):
            await running.start(server.binary(), running.port)
        await running.start(server.binary(), running.port)
        assert running.port == default_port


async def test_a_start_that_fails_for_another_cause_keeps_the_port(
    files: server.ServerFiles, default_port: int
) -> None:
    async with server.running(files, port=default_port) as running:
        await running.stop()
        with pytest.raises(BusError, match=f"did not start on port {default_port}"):
            await running.start(Path("/bin/false"), running.port)
        await running.start(server.binary(), running.port)
        assert running.port == default_port
    first = server.Server(files, [], "127.0.0.1")
    with pytest.raises(BusError, match=f"did not start on port {default_port}"):
        await first.start(Path("/bin/false"), default_port)


async def test_an_address_that_the_host_lacks_is_named(
    files: server.ServerFiles, default_port: int
) -> None:
    with pytest.raises(BusError, match=f"198.51.100.77:{default_port}: Cannot assign"):
        await server.Server(files, [], "198.51.100.77").start(server.binary(), default_port)
