"""Attach and port-forward, by clients as kubelet and crictl have them."""

import asyncio
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import StatusCode
from services.cri.tests.stream_clients import SpdyClient, Tunnel, websocket
from services.cri.tests.world import Fleet, Kubelet

from virtbus.cri.core import spdy
from virtbus.cri.edge import stream_server
from virtbus.cri.edge.client_streams import STREAMS_AT_ONCE, SpdyStreams

V4 = "v4.channel.k8s.io"
FORWARD = "portforward.k8s.io"


async def attach(kubelet: Kubelet, container_id: str, **changes: Any) -> str:
    """Return the URL of an attach with a terminal."""
    want = {"stdin": True, "stdout": True, "tty": True} | changes
    answer = await kubelet.call("Attach", container_id=container_id, **want)
    return str(answer.url)


async def test_attach_over_spdy_is_the_console(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    url = await attach(kubelet, container_id)
    async with SpdyClient(url, V4) as client:
        assert "101 Switching" in client.head
        assert V4 in client.head
        error, stdin, stdout, resize = (
            client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")
        )
        client.send(resize, b'{"Width":80,"Height":24}')
        client.send(stdin, b"ls\r")
        assert await client.until(stdout, b"echo ls") == b"welcome\r\necho ls\r"
        client.send(stdin, b"\x1d")  # Ctrl-]
        assert await client.status(error) == {"metadata": {}, "status": "Success"}
        await client.until_ended(stdout)
        while fleet.agent.consoles:
            await asyncio.sleep(0.01)


async def test_attach_over_a_websocket_is_the_console(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    for protocol in ("v5.channel.k8s.io", V4):
        async with websocket(await attach(kubelet, container_id), protocol) as socket:
            assert await socket.recv() == b"\x01"
            assert await socket.recv() == b"\x01welcome\r\n"
            await socket.send(b"\x04" + b'{"Width":80,"Height":24}')
            await socket.send(b"\x00ls\r")
            assert await socket.recv() == b"\x01echo ls\r"
            await socket.send(b"\x00\x1d")
            status = await socket.recv()
            assert isinstance(status, bytes)
            assert (status[0], json.loads(status[1:])["status"]) == (3, "Success")


async def test_a_guest_that_stops_ends_its_attaches(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    async with SpdyClient(await attach(kubelet, container_id, stdin=False), V4) as client:
        error, stdout, _ = (client.open(streamtype=one) for one in ("error", "stdout", "resize"))
        await client.until(stdout, b"welcome")
        fleet.agent.end("the guest stopped")
        assert (await client.status(error))["status"] == "Success"


async def test_only_an_attach_with_stdin_types(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    async with SpdyClient(await attach(kubelet, container_id, stdin=False), V4) as client:
        _, stdout, _ = (client.open(streamtype=one) for one in ("error", "stdout", "resize"))
        await client.until(stdout, b"welcome")
        assert [want.write for want in fleet.agent.consoles] == [False]


@pytest.mark.parametrize("tunnel", [False, True])
async def test_port_forward_carries_connections(
    fleet: Fleet, kubelet: Kubelet, *, tunnel: bool
) -> None:
    sandbox_id, _ = await kubelet.running()
    url = (await kubelet.call("PortForward", pod_sandbox_id=sandbox_id, port=[80])).url
    async with Tunnel(url) if tunnel else SpdyClient(url, FORWARD) as client:
        await _use(client)


async def _use(client: SpdyClient) -> None:
    """Use two connections at once, and one to a closed port."""
    pairs = []
    for number, port in enumerate(("80", "81", "9")):
        named = {"port": port, "requestid": str(number)}
        pairs.append(
            (client.open(streamtype="error", **named), client.open(streamtype="data", **named))
        )
    (error, data), (other_error, other), (refused, _) = pairs
    client.send(data, b"GET /", ends=True)
    client.send(other, b"x" * 100_000, ends=True)
    await client.until_ended(error, data, other_error, other, refused)
    assert client.got[data] == b"80:GET /"
    assert client.got[other] == b"81:" + b"x" * 100_000
    assert (client.got[error], client.got[other_error]) == (b"", b"")
    assert b"nothing listens on port 9" in client.got[refused]


class Recording:
    """A connection that sends `sent`, and drops what it receives."""

    def __init__(self) -> None:
        self.sent = bytearray()

    async def read(self) -> bytes | None:
        data, self.sent = bytes(self.sent), bytearray()
        return data or None

    async def write(self, data: bytes) -> None: ...


async def test_a_client_that_resets_its_streams_does_not_make_memory_grow() -> None:
    client, raw = SpdyClient("http://127.0.0.1:1/", V4), Recording()
    client.writer = cast("Any", SimpleNamespace(write=raw.sent.extend))
    for _ in range(3 * STREAMS_AT_ONCE):
        number = client.open(streamtype="other")
        raw.sent += spdy.control(spdy.RST_STREAM, struct.pack(">II", number, 5))
    streams = SpdyStreams(raw)
    await streams.run()
    kept = 0
    while await streams.opened() is not None:
        kept += 1
    assert kept == STREAMS_AT_ONCE


async def test_a_url_is_good_for_one_connection(kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    url = await attach(kubelet, container_id)
    async with SpdyClient(url, V4) as client:
        assert "101" in client.head
    async with SpdyClient(url, V4) as client:
        assert "404 Not Found" in client.head
    async with SpdyClient(await attach(kubelet, container_id), "other") as client:
        assert "403 Forbidden" in client.head
        assert f"X-Accepted-Stream-Protocol-Versions: {V4}" in client.head


async def test_a_url_ends_with_its_time(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    _, container_id = await kubelet.running()
    monkeypatch.setattr(stream_server, "TICKET_S", 0.0)
    url = await attach(kubelet, container_id)
    await asyncio.sleep(0.01)
    async with SpdyClient(url, V4) as client:
        assert "404 Not Found" in client.head


async def test_sessions_that_cannot_be_are_refused_by_the_call(kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    container_id = await kubelet.container(sandbox_id)
    for name, request, code in (
        ("Attach", {"container_id": "none", "stdout": True}, StatusCode.NOT_FOUND),
        ("Attach", {"container_id": container_id, "stdout": True}, StatusCode.FAILED_PRECONDITION),
        ("PortForward", {"pod_sandbox_id": "none"}, StatusCode.NOT_FOUND),
        ("PortForward", {"pod_sandbox_id": sandbox_id}, StatusCode.FAILED_PRECONDITION),
    ):
        assert (await kubelet.refused(name, **request))[0] == code
    await kubelet.call("StartContainer", container_id=container_id)
    for streams in ((), ("stdout", "stderr", "tty")):
        flags = dict.fromkeys(streams, True)
        code, _ = await kubelet.refused("Attach", container_id=container_id, **flags)
        assert code == StatusCode.INVALID_ARGUMENT


async def test_a_session_tells_why_the_bus_cannot_serve_it(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    url = await attach(kubelet, container_id)
    fleet.cut()
    async with SpdyClient(url, V4) as client:
        error, *_ = (client.open(streamtype=one) for one in ("error", "stdin", "stdout", "resize"))
        status = await client.status(error)
        assert (status["status"], "bus is away" in status["message"]) == ("Failure", True)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x03\x00\x01\x00\x00\x00\x04abcd",  # a stream without a header block
        b"\x80\x03\x00\x01\x00\xff\xff\xff",  # a control frame of 16 MiB
        b"\x80\x02\x00\x01\x00\x00\x00\x00",  # SPDY/2
        b"\x80\x03\x00\x01\x00\x00\x00\x20" + b"\xff" * 32,
        b"\xff" * 4096,
    ],
)
async def test_hostile_frames_end_their_own_connection(
    fleet: Fleet, kubelet: Kubelet, hostile: bytes
) -> None:
    _, container_id = await kubelet.running()
    async with SpdyClient(await attach(kubelet, container_id), V4) as client:
        client.writer.write(hostile)
        async with asyncio.timeout(5):
            assert await client.reader.read() == b""
    async with SpdyClient(await attach(kubelet, container_id), V4) as client:
        assert "101" in client.head


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_a_hundred_attaches_that_do_not_read_cost_bounded_memory(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    _, container_id = await kubelet.running()
    fleet.agent.floods = True
    before = resident_bytes()
    clients = [SpdyClient(await attach(kubelet, container_id), V4) for _ in range(100)]
    for client in clients:
        await client.__aenter__()
        for name in ("error", "stdin", "stdout", "resize"):
            client.open(streamtype=name)
    half_open = [await asyncio.open_connection(*client.address) for client in clients]
    while len(fleet.agent.consoles) < len(clients) or not fleet.agent.stalled:
        await asyncio.sleep(0.05)
    assert await kubelet.call("Version")
    assert resident_bytes() - before < 80 * 1024 * 1024
    for client in clients:
        client.writer.close()
    for _, writer in half_open:
        writer.close()
    while fleet.agent.consoles:
        await asyncio.sleep(0.01)
