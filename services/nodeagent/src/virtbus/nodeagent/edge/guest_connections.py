"""Opens connections from the host to its guests, for clients' streams (ADR 0023)."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

from virtbus.bus.client.streams import ByteStream, carry
from virtbus.nodeagent.edge.libvirt_displays import LibvirtDisplays
from virtbus.nodeagent.streams import Carry
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import PortOpen

CONNECT_S = 5.0
CLOSE_S = 5.0
"""The time limit for a guest to read pending data after the end of the stream."""
MAX_DATAGRAMS = 64


class GuestConnections:
    """The `GuestStreams` port."""

    def __init__(self, displays: LibvirtDisplays) -> None:
        self._displays = displays

    @asynccontextmanager
    async def display(self, uid: str) -> AsyncIterator[Carry]:
        connected = await self._displays.connect(uid)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connected)
        except BaseException:
            connected.close()
            raise
        try:
            yield partial(carry, reader=reader, writer=writer)
        finally:
            await close(writer)

    async def screenshot(self, uid: str) -> bytes:
        return await self._displays.screenshot(uid)

    def port(self, address: str, want: PortOpen) -> AbstractAsyncContextManager[Carry]:
        return _udp(address, want.port) if want.protocol == "udp" else _tcp(address, want.port)


@asynccontextmanager
async def _tcp(address: str, port: int) -> AsyncIterator[Carry]:
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        message = f"nothing listens on port {port} of the guest ({address})"
        raise VirtbusError(Code.CONFLICT, "port_refused", message) from None
    except (OSError, TimeoutError) as error:
        raise _silent(address, port, str(error) or "no answer in time") from None
    try:
        yield partial(carry, reader=reader, writer=writer)
    finally:
        await close(writer)


def _silent(address: str, port: int, why: str) -> VirtbusError:
    message = (
        f"the guest does not answer at {address} port {port} ({why}); "
        "`virtbus vm get` shows whether it runs"
    )
    return VirtbusError(Code.UNAVAILABLE, "port_silent", message, after_ms=1000)


async def close(writer: asyncio.StreamWriter) -> None:
    """Close the connection completely.

    asyncio first sends the rest of its buffer. After CLOSE_S, abort, because a guest that does not
    read would keep the connection open for ever.
    """
    writer.close()
    try:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


class _Datagrams(asyncio.DatagramProtocol):
    """Queues the last 64 datagrams of the guest that wait for `back`."""

    def __init__(self) -> None:
        self.received: deque[bytes] = deque(maxlen=MAX_DATAGRAMS)
        self.wake = asyncio.Event()

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr
        self.received.append(data)
        self.wake.set()

    def error_received(self, exc: Exception) -> None:
        """Ignore errors, such as a missing listener, because datagrams may be lost."""


@asynccontextmanager
async def _udp(address: str, port: int) -> AsyncIterator[Carry]:
    loop = asyncio.get_running_loop()
    remote = (address, port)
    try:
        transport, datagrams = await loop.create_datagram_endpoint(_Datagrams, remote_addr=remote)
    except OSError as error:  # no route
        raise _silent(address, port, str(error)) from None

    async def out(stream: ByteStream) -> None:
        while data := await stream.read():
            transport.sendto(data)

    async def back(stream: ByteStream) -> None:
        while True:
            await datagrams.wake.wait()
            datagrams.wake.clear()
            while datagrams.received:
                await stream.write_datagram(datagrams.received.popleft())

    try:
        yield lambda stream: stream.while_open(out(stream), back(stream))
    finally:
        transport.close()
