"""Forwards local ports to a guest: each local connection gets a stream of its own (ADR 0023)."""

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from virtbus.bus.client.flow_control import CHUNK_BYTES
from virtbus.bus.client.ports import Bus
from virtbus.bus.client.streams import ByteStream, carry, opening
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import Background
from virtbus.cli.bus_client import connected
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.streams import PortOpen, StreamOpen

UDP_IDLE_S = 60.0
"""The stream of a local UDP address ends after this time without a datagram from the address."""
MAX_DATAGRAMS = 64

Say = Callable[[str], None]
Address = tuple[str | int, ...]


class ForwardTarget(NamedTuple):
    """A VM, and its node's subject for requests that open a stream."""

    bus: Bus
    subject: str
    uid: str
    owner: str

    def port(self, port: int, protocol: str = "tcp") -> PortOpen:
        values = {"uid": self.uid, "port": port, "protocol": protocol, "owner": self.owner}
        return PortOpen.model_validate(values)


@asynccontextmanager
async def reaching(
    settings: BusSettings, subject: str, uid: str, owner: str
) -> AsyncIterator[ForwardTarget]:
    """Connect to the bus while the context is open; raises the errors of `connected`."""
    async with connected(settings) as bus:
        yield ForwardTarget(bus, subject, uid, owner)


async def listen_tcp(
    target: ForwardTarget, tasks: Background, local: tuple[str, int], want: StreamOpen, say: Say
) -> int:
    """Listen on `local`, and forward each connection until `tasks` ends; return the bound port.

    Raises:
        OSError: `local` cannot be bound.
    """
    server = await asyncio.start_server(_accepting(target, tasks, want, say), *local)
    tasks.start(_keep(server))
    bound: int = server.sockets[0].getsockname()[1]
    return bound


async def listen_unix(
    target: ForwardTarget, tasks: Background, path: Path, want: StreamOpen, say: Say
) -> None:
    """Listen on the new socket `path`, and forward each connection until `tasks` ends.

    Only the user of this process can connect.

    Raises:
        OSError: `path` cannot be bound.
    """
    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(_accepting(target, tasks, want, say), path)
    finally:
        os.umask(before)
    tasks.start(_keep(server))


def _accepting(
    target: ForwardTarget, tasks: Background, want: StreamOpen, say: Say
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with opening(target.bus, target.subject, want) as stream:
                await carry(stream, reader, writer)
        except (VirtbusError, BusError) as error:
            say(str(error))
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(serve(reader, writer))

    return connected


async def _keep(server: asyncio.Server) -> None:
    async with server:
        await server.serve_forever()


class _Local(asyncio.DatagramProtocol):
    """A local UDP port with a stream for each sender's address."""

    def __init__(
        self, target: ForwardTarget, tasks: Background, want: StreamOpen, say: Say
    ) -> None:
        self._target = target
        self._tasks = tasks
        self._want = want
        self._say = say
        self._senders: dict[Address, asyncio.Queue[bytes]] = {}
        self.transport: asyncio.DatagramTransport | None = None

    def datagram_received(self, data: bytes, addr: Address) -> None:
        queue = self._senders.get(addr)
        if queue is None:
            queue = self._senders[addr] = asyncio.Queue(MAX_DATAGRAMS)
            self._tasks.start(self._serve(addr, queue))
        if not queue.full():
            queue.put_nowait(data)

    async def _serve(self, addr: Address, queue: asyncio.Queue[bytes]) -> None:
        try:
            async with opening(
                self._target.bus, self._target.subject, self._want, datagrams=True
            ) as stream:
                await stream.while_open(_send(queue, stream), self._answer(stream, addr))
        except (VirtbusError, BusError) as error:
            self._say(str(error))
        finally:
            del self._senders[addr]

    async def _answer(self, stream: ByteStream, addr: Address) -> None:
        while data := await stream.read():
            if self.transport is not None:
                self.transport.sendto(data, addr)


async def _send(queue: asyncio.Queue[bytes], stream: ByteStream) -> None:
    try:
        while True:
            async with asyncio.timeout(UDP_IDLE_S):
                data = await queue.get()
            await stream.write_datagram(data)
    except TimeoutError:
        stream.end("nothing was sent for a while")


async def listen_udp(
    target: ForwardTarget, tasks: Background, local: tuple[str, int], want: StreamOpen, say: Say
) -> int:
    """Listen on `local`, and forward each datagram until `tasks` ends; return the bound port.

    Raises:
        OSError: `local` cannot be bound.
    """
    loop = asyncio.get_running_loop()
    made = _Local(target, tasks, want, say)
    transport, _ = await loop.create_datagram_endpoint(lambda: made, local_addr=local)
    made.transport = transport
    tasks.start(_close(transport))
    bound: int = transport.get_extra_info("sockname")[1]
    return bound


async def _close(transport: asyncio.BaseTransport) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        transport.close()


async def stdio(target: ForwardTarget, port: int) -> str:
    """Connect a guest's TCP port to stdin and stdout, for ssh's ProxyCommand.

    Return the reason of the stream's end.
    """
    read = await _stdin()
    out_fd = sys.stdout.fileno()

    async def out() -> None:
        while data := await stream.read():
            await asyncio.to_thread(_write_all, out_fd, data)
        stream.end("the guest closed the connection")

    async def back() -> None:
        while data := await read(CHUNK_BYTES):
            await stream.write(data)
        await stream.finish()

    async with opening(target.bus, target.subject, target.port(port)) as stream:
        await stream.while_open(out(), back())
        return stream.closed


async def _stdin() -> Callable[[int], Awaitable[bytes]]:
    """Return a function that reads from standard input, at most the given number of bytes."""
    descriptor = sys.stdin.fileno()
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # asyncio refuses regular files
        return lambda most: asyncio.to_thread(os.read, descriptor, most)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader.read


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
