"""Serves the streams of a node's VMs: consoles, their logs, displays, guest ports (ADR 0023)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from virtbus.bus.client.ports import Bus, Endpoint, Request
from virtbus.bus.client.streams import ByteStream, accepting
from virtbus.nodeagent.core.guest_backups import GuestReadPort
from virtbus.nodeagent.core.ports import Console, ConsoleViewer
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.streams import ConsoleOpen, LogsRead, PortOpen, StreamOpen
from virtbus.schemas.wire import validate

STREAMS_AT_ONCE = 200
"""The limit of concurrent streams of each kind on one node; SCREENSHOTS_AT_ONCE is separate."""
SCREENSHOTS_AT_ONCE = 8
"""The limit of concurrent screenshots. Each uses up to 32 MiB of memory."""
PICTURE_S = 60.0
"""The time in which a client must read a screenshot."""
END_OF_LOG = "end of log"
END_OF_PICTURE = "end of picture"
NOT_TAKEN = "the picture was not read in time; ask for it again"
DISPLAY_ENDED = "the guest stopped, or closed the connection"


Carry = Callable[[ByteStream], Awaitable[None]]
"""Copies bytes between a stream and a connection, until both directions end or one breaks."""


class GuestStreams(Protocol):
    """Opens connections from the node to its guests."""

    def port(self, address: str, want: PortOpen) -> AbstractAsyncContextManager[Carry]:
        """Open a connection to a port of the guest at `address`.

        Raises:
            VirtbusError: 409 `port_refused`: the guest refuses the connection. 503 `port_silent`:
                the guest does not answer.
        """

    def display(self, uid: str) -> AbstractAsyncContextManager[Carry]:
        """Open a connection to the guest's VNC server.

        Raises:
            VirtbusError: 409 `no_display`: the VM has no display. 409 `domain_state`: no guest
                runs. 503 `display_busy`: libvirt has not answered an earlier call about
                this display. The errors of libvirt.
        """

    async def screenshot(self, uid: str) -> bytes:
        """Return a picture of the display, as the bytes of a PNG.

        Raises:
            VirtbusError: the errors of `display`. 422 `no_png`: QEMU made no PNG, or the PNG is too
                large.
        """


class DiskServers(GuestReadPort, Protocol):
    """Lets a guest's QEMU serve the guest's disks, and connects to the server in QEMU."""

    def connected(self, uid: str, reading: str) -> AbstractAsyncContextManager[Carry]:
        """Open a connection to the NBD server of the guest's QEMU for a reading (ADR 0079).

        Raises:
            VirtbusError: 409 `not_served`: QEMU does not serve the disks for this reading.
        """


class Streams:
    """Handles requests for streams. A stream ends when the handler of its request returns."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        console: Console,
        guests: GuestStreams | None,
        interfaces: Callable[[str], Sequence[InterfaceStatus]],
        *,
        check_here: Callable[[str, str], None],
    ) -> None:
        """`check_here` raises for a VM that is not here, or that the account may not use.

        Without `guests`, guests are simulated. `interfaces` returns a VM's interfaces by uid.
        """
        self._bus = bus
        self._node = node
        self._console = console
        self._guests = guests
        self._interfaces = interfaces
        self._check_here = check_here

    def endpoints(self) -> list[Endpoint]:
        """Return an endpoint for each kind of stream. Requests beyond its limit get 429 at once."""
        handlers: dict[str, Callable[[Request], Awaitable[None]]] = {
            "console": self._view,
            "logs": self._read,
            "port": self._connect,
            "vnc": self._watch,
            "screenshot": self._shoot,
        }
        return [
            Endpoint(
                f"agent-{verb}",
                subjects.rpc(self._node, "agent", verb),
                handler,
                limit=SCREENSHOTS_AT_ONCE if verb == "screenshot" else STREAMS_AT_ONCE,
                backlog=0,
            )
            for verb, handler in handlers.items()
        ]

    async def _view(self, request: Request) -> None:
        want = validate(ConsoleOpen, request.data)
        self._check_here(want.uid, request.account)
        console = self._console.attach(
            want.uid, write=want.write, tail_bytes=want.tail_bytes, owner=want.owner
        )
        async with console as viewer, accepting(self._bus, request, want) as stream:
            await stream.while_open(_show(viewer, stream), _type(stream, viewer))

    async def _connect(self, request: Request) -> None:
        want = validate(PortOpen, request.data)
        self._check_here(want.uid, request.account)
        guests = self._real_guests()
        udp = want.protocol == "udp"
        async with (
            guests.port(_address(self._interfaces(want.uid)), want) as carry,
            accepting(self._bus, request, want, datagrams=udp) as stream,
        ):
            await carry(stream)
            stream.end("the guest closed the connection")

    async def _watch(self, request: Request) -> None:
        want = validate(StreamOpen, request.data)
        self._check_here(want.uid, request.account)
        async with (
            self._real_guests().display(want.uid) as carry,
            accepting(self._bus, request, want) as stream,
        ):
            await carry(stream)
            stream.end(DISPLAY_ENDED)

    async def _shoot(self, request: Request) -> None:
        want = validate(StreamOpen, request.data)
        self._check_here(want.uid, request.account)
        picture = await self._real_guests().screenshot(want.uid)
        async with accepting(self._bus, request, want) as stream:
            try:
                async with asyncio.timeout(PICTURE_S):
                    await stream.while_open(_tell(picture, stream))
            except TimeoutError:
                stream.end(NOT_TAKEN)

    def _real_guests(self) -> GuestStreams:
        if self._guests is None:
            message = (
                f"the guests of node {self._node} are simulated: there is nothing to connect to"
            )
            raise VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
        return self._guests

    async def _read(self, request: Request) -> None:
        want = validate(LogsRead, request.data)
        self._check_here(want.uid, request.account)
        async with accepting(self._bus, request, want) as stream:
            await stream.while_open(self._tell_log(want, stream))

    async def _tell_log(self, want: LogsRead, stream: ByteStream) -> None:
        log = self._console.read_log(want.uid, tail_bytes=want.tail_bytes, follow=want.follow)
        async for output in log:
            await stream.write(output)
        stream.end(END_OF_LOG)


def _address(interfaces: Sequence[InterfaceStatus]) -> str:
    """Return the guest's first IPv4 address, or its first address if none is IPv4.

    Raises:
        VirtbusError: 409 `no_address`: the guest has no known address.
    """
    found = [a.partition("/")[0] for interface in interfaces for a in interface.addresses]
    if not found:
        message = "the guest has no address (yet); `virtbus vm get` shows its interfaces"
        raise VirtbusError(Code.CONFLICT, "no_address", message, after_ms=1000)
    return next((address for address in found if ":" not in address), found[0])


async def _show(viewer: ConsoleViewer, stream: ByteStream) -> None:
    async for output in viewer.output():
        if isinstance(output, str):
            await stream.note(output)
        else:
            await stream.write(output)
    stream.end(viewer.closed)


async def _tell(picture: bytes, stream: ByteStream) -> None:
    await stream.write(picture)
    stream.end(END_OF_PICTURE)


async def _type(stream: ByteStream, viewer: ConsoleViewer) -> None:
    """Forward the client's input to the guest.

    The session continues after the end of the input, because output may follow piped input.
    """
    while keys := await stream.read():
        await viewer.write(keys)
