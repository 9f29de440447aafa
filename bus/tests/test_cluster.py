"""Three servers: three copies of each stream, clients that fail over, stores of one kind."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from bus.tests.three_servers import NODES, ThreeServers, three_servers

from virtbus.bus.client.connection import connect
from virtbus.bus.client.consumers import node_consumer
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, Watch, WatchMark
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.provisioning.cluster import ClusterMember

pytestmark = pytest.mark.integration

KEY = "$KV.vm.n1.01900000-0000-7000-8000-000000000001"


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[ThreeServers]:
    async with three_servers(tmp_path) as found:
        await declare(found)
        yield found


async def declare(three: ThreeServers) -> None:
    async with connect(three.settings("admin"), name="admin") as admin, asyncio.timeout(60):
        while True:
            try:
                await stream_setup.ensure(admin)
                for node in NODES:
                    await stream_setup.ensure_node(admin, node, b"nonce")
            except (UnavailableError, OutcomeUnknownError):  # servers still find each other
                await asyncio.sleep(0.1)
            else:
                return


async def test_streams_have_three_copies_and_writes_outlive_each_server(
    three: ThreeServers,
) -> None:
    async with connect(three.settings("controller"), name="c") as bus:
        assert {stream.replicas for stream in await bus.report()} == {3}
        revision = 0
        for number in range(3):
            await three.servers[number].kill()
            revision = await written(bus, b"%d" % number)
            await three.restart(number)
        entry = await bus.get(KEY)
        assert entry is not None
        assert (entry.value, entry.revision) == (b"2", revision)


async def test_a_nodes_watches_are_in_memory_and_outlive_all_servers_at_once(
    three: ThreeServers,
) -> None:
    for one in three.servers:
        await one.kill()
    for number in range(3):
        await three.restart(number)
    await declare(three)
    async with connect(three.settings("admin"), name="admin") as admin:
        there = await admin.js_api(f"CONSUMER.INFO.KV_vm.{node_consumer('n1', 'agent')}")
        assert there["config"]["mem_storage"]
        assert len(there["cluster"]["replicas"]) == 2


@pytest.mark.parametrize("user", ["agent", "netd"])
async def test_a_nodes_list_is_complete_after_any_earlier_pull(
    three: ThreeServers, user: str
) -> None:
    """A cluster still sends to abandoned pulls: they would consume the list."""
    async with connect(three.settings("controller"), name="c") as bus:
        keys = {f"$KV.vm.n1.01900000-0000-7000-8000-{number:012}" for number in range(20)}
        for key in keys:
            await bus.put(key, b"vm")
    keys.add("$KV.vm.n1._join")
    account = "node-n1" if user == "agent" else "netd-n1"
    async with (
        connect(three.settings(account), name="n1") as node,
        node.node_watch("n1", user) as watch,
    ):
        await seen(watch, keys)
    for _ in range(3):  # a restarted process
        async with (
            connect(three.settings(account), name="n1") as node,
            node.node_watch("n1", user) as watch,
        ):
            assert await listed(watch) == keys
            for _ in range(3):
                watch.relist()
                assert await listed(watch) == keys


async def seen(watch: Watch, keys: set[str]) -> None:
    """Read until all `keys` came: the consumer's server may lag behind acknowledged writes."""
    missing = set(keys)
    async with asyncio.timeout(20):
        while missing:
            item = await anext(aiter(watch))
            if isinstance(item, Entry):
                missing.discard(item.key)


async def listed(watch: Watch) -> set[str]:
    """Return the keys of the next whole list."""
    found: set[str] = set()
    async with asyncio.timeout(20):
        async for item in watch:
            if item is WatchMark.RESET:
                found = set()
            elif item is WatchMark.SYNCED:
                break
            elif isinstance(item, Entry):
                found.add(item.key)
    return found


async def test_a_watch_that_an_older_version_made_keeps_its_storage(three: ThreeServers) -> None:
    config = dict(stream_setup.node_consumers("n9"))["KV_vm"] | {"mem_storage": False}
    name = config["durable_name"]
    async with connect(three.settings("admin"), name="admin") as admin:
        body = {"stream_name": "KV_vm", "config": config, "action": ""}
        await admin.js_api(f"CONSUMER.CREATE.KV_vm.{name}.{config['filter_subject']}", body)
        await stream_setup.ensure_node(admin, "n9", b"nonce")
        there = await admin.js_api(f"CONSUMER.INFO.KV_vm.{name}")
        assert not there["config"].get("mem_storage")


async def written(bus: NatsBus, value: bytes) -> int:
    """Put until it is stored: repeat while unavailable or unknown."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await bus.put(KEY, value)
            except BusError:
                await asyncio.sleep(0.1)


async def test_a_new_cluster_waits_for_the_third_server(tmp_path: Path) -> None:
    async with three_servers(tmp_path, at_first=2) as three:
        async with connect(three.settings("admin"), name="admin") as admin:
            with pytest.raises(UnavailableError, match="three servers"):
                await once_led(admin)
        await three.add()
        await declare(three)


async def once_led(admin: NatsBus) -> None:
    """Declare once the two servers have a leader."""
    while True:
        with suppress(OutcomeUnknownError):
            await stream_setup.ensure(admin)


async def test_a_single_servers_store_is_refused_by_a_cluster(tmp_path: Path) -> None:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with (
        server.running(files, port=-1) as running,
        connect(running.settings("admin"), name="admin") as admin,
    ):
        await stream_setup.ensure(admin)
    cluster = ClusterMember("127.0.0.1:16222", ("127.0.0.1:16222",))
    with pytest.raises(BusError, match="restore it there"):
        async with server.running(files, port=-1, cluster=cluster):
            pass


async def test_a_silent_server_is_skipped(nats: server.Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        urls = f"{mute},{nats.url}"
        settings = nats.settings("controller", url=urls, connect_timeout_s=30)
        for _ in range(4):  # the order is drawn again each time
            async with connect(settings, name="c") as bus:
                await bus.put(KEY, b"x")
