"""A bus that another version declared is refused before anything changes on it."""

import asyncio
from typing import Any

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.provisioning import server, stream_setup
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration


class CountingAdmin:
    """An `Admin` that notes each call of JetStream's API."""

    def __init__(self, admin: stream_setup.Admin) -> None:
        self.asked: list[str] = []
        self.clustered = admin.clustered
        self.get = admin.get
        self.put = admin.put
        self._admin = admin

    async def js_api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.asked.append(verb)
        return await self._admin.js_api(verb, body)


async def configured(admin: NatsBus) -> list[dict[str, object]]:
    return [
        (await admin.js_api(f"STREAM.INFO.{config['name']}"))["config"]
        for config in stream_setup.streams(stream_setup.Sizes(), 1)
    ]


async def declare_as(admin: NatsBus, version: str) -> None:
    """Make the streams look as another version leaves them; 0.1 wrote no version."""
    info = await admin.js_api("STREAM.INFO.KV_vm")
    metadata = {"virtbus.schema": version} if version else {}
    await admin.js_api("STREAM.UPDATE.KV_vm", {**info["config"], "metadata": metadata})


@pytest.mark.parametrize(
    ("version", "reason", "says"),
    [("", "older_bus", r"upgrade-from-0\.1"), ("3", "newer_bus", "upgrade it")],
)
async def test_a_bus_of_another_version_is_refused_unchanged_with_the_next_step(
    nats: server.Server, controller: NatsBus, version: str, reason: str, says: str
) -> None:
    async with connect(nats.settings("admin"), name="admin") as admin:
        await declare_as(admin, version)
        before = await configured(admin)
        with pytest.raises(VirtbusError, match=says) as refused:
            await stream_setup.ensure(admin)
        assert refused.value.reason == reason
        with pytest.raises(VirtbusError, match=says):  # a controller ends before it serves
            await asyncio.wait_for(stream_setup.keep(controller), 30)
        assert await configured(admin) == before


async def test_a_repeated_declaration_changes_nothing(nats: server.Server) -> None:
    async with connect(nats.settings("admin"), name="admin") as admin:
        before = await configured(admin)
        counting = CountingAdmin(admin)
        await stream_setup.ensure(counting)
        assert not [verb for verb in counting.asked if "UPDATE" in verb]
        assert await configured(admin) == before
