"""The agent's streams of one node, as a fake: a console that echoes, and a guest with two ports."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from virtbus.bus.client.ports import Bus, Endpoint, Request
from virtbus.bus.client.streams import ByteStream, accepting
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestExec, GuestExecuted
from virtbus.schemas.streams import ConsoleOpen, PortOpen
from virtbus.schemas.wire import validate

PORTS = frozenset({80, 81})


class Agent:
    """Serves consoles and ports."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self._ends: set[ByteStream] = set()
        self.consoles: list[ConsoleOpen] = []
        """The consoles that are open now."""
        self.floods = False
        """Consoles write as fast as their clients read."""
        self._wrote_s = 0.0
        self.refuses = ""
        """The reason why the guest agent runs no program."""
        self.hangs = False
        """Commands are never answered."""
        self.running = self.most_running = 0

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints of the streams."""
        handlers: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "console": self._console,
            "port": self._port,
            "exec": self._exec,
        }
        return [
            Endpoint(f"agent-{verb}", subjects.rpc(self._node, "agent", verb), handler, limit=200)
            for verb, handler in handlers.items()
        ]

    @property
    def stalled(self) -> bool:
        """Return True if no console could write lately."""
        return asyncio.get_running_loop().time() - self._wrote_s > 0.3

    def end(self, why: str) -> None:
        """End all consoles, as the agent does when a guest stops."""
        for stream in self._ends:
            stream.end(why)

    async def _console(self, request: Request) -> None:
        want = validate(ConsoleOpen, request.data)
        async with accepting(self._bus, request, want) as stream:
            self.consoles.append(want)
            self._ends.add(stream)
            try:
                await stream.while_open(self._echo(stream), self._show(stream))
            finally:
                self.consoles.remove(want)
                self._ends.discard(stream)

    async def _show(self, stream: ByteStream) -> None:
        await stream.write(b"welcome\r\n")
        while self.floods:
            await stream.write(b"x" * 32768)
            self._wrote_s = asyncio.get_running_loop().time()
        await asyncio.get_running_loop().create_future()

    @staticmethod
    async def _echo(stream: ByteStream) -> None:
        while keys := await stream.read():
            await stream.write(b"echo " + keys)

    async def _exec(self, request: Request) -> GuestExecuted:
        want = validate(GuestExec, request.data)
        if self.refuses:
            raise VirtbusError(Code.CONFLICT, self.refuses, "no guest agent runs in the guest")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            if want.words[0] == "sleep":
                await asyncio.sleep(float(want.words[1]))
        finally:
            self.running -= 1
        return GuestExecuted(exit_code=3, stdout=" ".join(want.words).encode(), stderr=b"agent")

    async def _port(self, request: Request) -> None:
        want = validate(PortOpen, request.data)
        if want.port not in PORTS:
            message = f"nothing listens on port {want.port} of the guest"
            raise VirtbusError(Code.CONFLICT, "port_refused", message)
        async with accepting(self._bus, request, want) as stream:
            await stream.while_open(_repeat(stream, want.port))
            stream.end("the guest closed the connection")


async def _repeat(stream: ByteStream, port: int) -> None:
    """Send the number of the port, and all that came."""
    await stream.write(f"{port}:".encode())
    while data := await stream.read():
        await stream.write(data)
    await stream.finish()
