"""Whole processes on a real bus, under the worst messages of the observer and the client."""

import asyncio
from pathlib import Path

import pytest
from tests.hostile import CONTROLS, UID, bodies
from tests.integration.test_api import ask, controller, platform

from virtbus.bus.client.codec import pack
from virtbus.bus.client.connection import connect
from virtbus.bus.client.link import Raw
from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.provisioning.permissions import filled, node_rpc, observer
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.schemas import subjects
from virtbus.schemas.errors import MAX_ERROR_BYTES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def send(bus: NatsBus, subject: str, body: bytes) -> Raw:
    """Return the first answer to raw bytes; ask for JSON if the body does not name an encoding."""
    return await bus._link.ask(subject, body, headers={CONTENT_TYPE: JSON}, timeout_s=40)


async def test_neither_observer_nor_client_ends_a_service(tmp_path: Path) -> None:
    reads = [one for one in observer().publish if one.startswith("virtbus.api.v1.")]
    reads = [one for one in reads if "*" not in one]
    assert len(reads) >= 8
    async with platform(tmp_path) as client:
        pid = controller(tmp_path)
        await ask(client, "vm.create", name="web", image="tiny", uid=UID)
        settings = BusSettings.found(tmp_path / "run", "observer")
        async with connect(settings, name="observer") as bus:
            for subject in reads:
                for body in bodies(("uid",)):
                    assert len((await send(bus, subject, body)).body) <= MAX_ERROR_BYTES
        for subject, _ in node_rpc(for_clients=True):
            if "{session}" in subject:
                continue
            for body in (pack({"uid": CONTROLS}), b"\xc1", b"[]", b'{"a":' * 80_000):
                answer = await send(client, filled(subject, "n1"), body)
                assert answer.status == "503" or 0 < len(answer.body) <= MAX_ERROR_BYTES, subject
        await client.publish(subjects.client_span(), {"trace_id": CONTROLS})
        await asyncio.sleep(0.2)
        assert controller(tmp_path) == pid
        assert (await ask(client, "vm.get", uid=UID))["name"] == "web"
        assert await ask(client, "bus.status")
