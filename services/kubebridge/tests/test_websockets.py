"""A stream to a guest lasts no longer than its client, even if the guest accepts nothing."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from services.kubebridge.tests.manifests import UID
from services.kubebridge.tests.world import view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.streams import accepting
from virtbus.kubebridge.core.runtime.subresource_effects import GuestStream
from virtbus.kubebridge.edge.web import websockets
from virtbus.kubebridge.edge.web.guest_proxy import WINDOW_BYTES, Guests
from virtbus.schemas import subjects
from virtbus.schemas.streams import ConsoleOpen
from virtbus.schemas.vm_status import VmView


async def test_a_client_that_leaves_is_detected_while_its_guest_accepts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that pasted into the console of a paused guest and left holds no resources."""
    monkeypatch.setattr(websockets, "ALIVE_S", 0.05)
    bus, over = MemoryBus(MemoryServer()), asyncio.Event()
    guests = Guests(bus)

    async def get(_: Request) -> VmView:
        return view(UID)

    async def console(request: Request) -> None:
        want = ConsoleOpen(uid=UID, window=WINDOW_BYTES)
        async with accepting(bus, request, want) as stream:
            await stream.write(b"login: ")
            while not stream.closed:
                await asyncio.sleep(0.01)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await guests.stream(request, GuestStream("console", UID), "me")
        finally:
            over.set()

    ends = [
        Endpoint("get", subjects.api("vm", "get"), get),
        Endpoint("console", subjects.rpc("n1", "agent", "console"), console),
    ]
    app = web.Application()
    app.add_routes([web.get("/", handle)])
    async with (
        bus.serve(ServiceInfo("all", "1.0.0"), ends),
        TestClient(TestServer(app)) as client,
    ):
        socket = await client.ws_connect("/")
        assert (await socket.receive()).data == b"login: "

        async def flood() -> None:
            while True:
                await socket.send_bytes(bytes(16 * 1024))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 0.5)
        response = socket._response
        assert response.connection is not None
        assert response.connection.transport is not None
        response.connection.transport.abort()
        async with asyncio.timeout(10):
            await over.wait()
    await bus.aclose()
