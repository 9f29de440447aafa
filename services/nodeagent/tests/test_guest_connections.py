"""The node's connections to its guests: none outlives its stream, with any guest."""

import asyncio
import socket
from functools import partial
from typing import cast

import pytest

from virtbus.bus.client.flow_control import FlowControl
from virtbus.bus.client.streams import ByteStream
from virtbus.nodeagent.edge import guest_connections
from virtbus.nodeagent.edge.guest_connections import GuestConnections
from virtbus.nodeagent.edge.libvirt_displays import LibvirtDisplays
from virtbus.nodeagent.streams import Carry
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import PortOpen, StreamData

MORE_THAN_ANY_BUFFER = 16 * 1024 * 1024
UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


class Display:
    """QEMU's end of a connection to a display, which nobody reads."""

    def __init__(self) -> None:
        self.ours, self.qemus = socket.socketpair()
        self.qemus.settimeout(5)

    async def connect(self, uid: str) -> socket.socket:
        assert uid == UID
        return self.ours


async def say(_: StreamData) -> None:
    """Discard it."""


async def left_in_the_midst(carry: Carry) -> socket.socket:
    """Send more than the other side reads, then leave; return the connection's socket."""
    stream = ByteStream(say, FlowControl(MORE_THAN_ANY_BUFFER))
    stream.heard(StreamData(data=bytes(MORE_THAN_ANY_BUFFER)))
    writer: asyncio.StreamWriter = cast("partial[None]", carry).keywords["writer"]

    async def leave() -> None:
        while not writer.transport.get_write_buffer_size():
            await asyncio.sleep(0)
        stream.heard(StreamData(closed="detached"))

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(leave())
        await carry(stream)
    return cast("socket.socket", writer.get_extra_info("socket"))


async def gone(connected: socket.socket) -> None:
    async with asyncio.timeout(5):
        while connected.fileno() != -1:
            await asyncio.sleep(0)


async def test_a_guest_that_reads_nothing_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_connections, "CLOSE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as guest:
        want = PortOpen(uid=UID, port=guest.getsockname()[1])
        async with GuestConnections(cast("LibvirtDisplays", None)).port("127.0.0.1", want) as carry:
            connected = await left_in_the_midst(carry)
        await gone(connected)


async def test_a_display_that_reads_nothing_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_connections, "CLOSE_S", 0.05)
    display = Display()
    with display.qemus:
        async with GuestConnections(cast("LibvirtDisplays", display)).display(UID) as carry:
            connected = await left_in_the_midst(carry)
        await gone(connected)


async def test_accepted_input_of_a_client_that_leaves_still_reaches_the_guest() -> None:
    display = Display()
    with display.qemus:
        async with GuestConnections(cast("LibvirtDisplays", display)).display(UID) as carry:
            stream = ByteStream(say, FlowControl(1024))
            stream.heard(StreamData(data=b"the last words", eof=True))
            stream.heard(StreamData(closed="detached"))
            await carry(stream)
        assert display.qemus.recv(100) == b"the last words"
        assert display.qemus.recv(100) == b""


async def test_an_unreachable_datagram_address_is_refused_like_a_silent_port() -> None:
    want = PortOpen(uid=UID, port=53, protocol="udp")
    with pytest.raises(VirtbusError) as refused:
        async with GuestConnections(cast("LibvirtDisplays", None)).port("255.255.255.255", want):
            pass
    assert (refused.value.code, refused.value.reason) == (Code.UNAVAILABLE, "port_silent")
