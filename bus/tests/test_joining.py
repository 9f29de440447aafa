"""A node joins a running bus by its heartbeat, and joins again after its consumers were removed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, WatchMark
from virtbus.bus.provisioning import node_join, server, stream_setup
from virtbus.bus.runtime.tasks import background

pytestmark = pytest.mark.integration

NODE = "n9"


@pytest.fixture
async def n9(nats: server.Server, controller: NatsBus) -> AsyncIterator[NatsBus]:
    """A node that never joined, on a bus with a controller that sees it."""
    await nats.add_node(NODE)
    async with background() as tasks, connect(nats.settings(f"node-{NODE}"), name=NODE) as bus:
        tasks.start(node_join.keep(controller, lambda: [NODE]))
        yield bus


async def listed(bus: NatsBus) -> list[str]:
    """Return the keys of one whole list of the node's records."""
    found: list[str] = []
    async with bus.node_watch(NODE, "agent") as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                return found
            if isinstance(item, Entry):
                found.append(item.key)
    raise AssertionError


async def test_a_new_node_gets_its_list_with_a_join_record(n9: NatsBus) -> None:
    async with asyncio.timeout(15):
        assert await listed(n9) == [f"$KV.vm.{NODE}._join"]


async def test_a_deleted_consumer_is_made_again(
    n9: NatsBus, controller: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_join, "VERIFY_S", 0.1)
    async with asyncio.timeout(18):
        before = await listed(n9)
        await controller.js_api(f"CONSUMER.DELETE.KV_vm.n-{NODE}-agent")
        assert await listed(n9) == before


async def test_a_node_whose_join_record_was_purged_loses_its_consumers_and_may_join_again(
    nats: server.Server, controller: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_join, "VERIFY_S", 0.1)
    await nats.add_node(NODE)
    shown = [NODE]
    async with (
        asyncio.timeout(18),
        background() as tasks,
        connect(nats.settings(f"node-{NODE}"), name=NODE) as bus,
    ):
        tasks.start(node_join.keep(controller, lambda: shown))
        before = await listed(bus)
        shown.clear()
        await controller.purge(f"$KV.vm.{NODE}._join")
        while any(NODE in name for _, name in await node_join._consumers(controller)):
            await asyncio.sleep(0.05)
        shown.append(NODE)
        assert await listed(bus) == before


async def test_a_node_that_cannot_join_delays_no_other(
    nats: server.Server, controller: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    name, key = "n-n3-agent", "$KV.vm.n3.>"
    push = {"durable_name": name, "deliver_subject": "x", "ack_policy": "none"}
    made = {"stream_name": "KV_vm", "config": push | {"filter_subject": key}, "action": ""}
    async with connect(nats.settings("admin"), name="admin") as admin:
        await admin.js_api(f"CONSUMER.CREATE.KV_vm.{name}.{key}", made)
    await nats.add_node(NODE)
    async with (
        asyncio.timeout(18),
        background() as tasks,
        connect(nats.settings(f"node-{NODE}"), name=NODE) as bus,
    ):
        tasks.start(node_join.keep(controller, lambda: ["n3", NODE]))
        assert await listed(bus) == [f"$KV.vm.{NODE}._join"]
        await asyncio.sleep(2 * stream_setup.RETRY_S + 0.5)
        told = [one.message for one in caplog.records if "n3 cannot join" in one.message]
        assert len(told) == 1, "once, although it is tried again"
        await controller.js_api(f"CONSUMER.DELETE.KV_vm.{name}")
        while ("KV_vm", "n-n3-netd") not in await node_join._consumers(controller):
            await asyncio.sleep(0.05)
