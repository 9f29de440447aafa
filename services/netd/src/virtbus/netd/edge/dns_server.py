"""Receives the DNS queries of guests on the gateway's address, and sends the answers.

Each address of a guest has its own UDP socket, connected to that address. The kernel thus drops
datagrams of other senders, and a flood fills only the buffer of its sender. For TCP, each gateway
has one listener. The listener closes connections from unknown addresses.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address

from virtbus.bus.runtime.tasks import Background, background
from virtbus.netd.core.dns_message import MAX_QUERY_BYTES
from virtbus.netd.core.query_limits import CONNECTIONS, QueryLimits
from virtbus.netd.core.token_bucket import TokenBucket

log = logging.getLogger(__name__)

PORT = 53
RATE_HZ, BURST = 1000.0, 1000
"""Queries of all guests together: per second, and at once. The limit bounds the resolver's CPU
time.
"""
CROWDED = 512
"""Open queries of all guests together. From this number on, each guest may have only two
(`query_limits.BUSY_WHEN_FULL`).
"""
FULL_WAIT_S = 0.05
"""Pause before the next read from a guest with its maximum of open queries."""
IDLE_S = 10.0
_BUFFER_BYTES = 64 * 1024
_BACKLOG = 64
_IP_FREEBIND = 15
"""Allows a bind to the gateway's address before the Linux bridge exists."""


class DnsGuest:
    """One address of a guest, with its socket and limits."""

    def __init__(
        self, address: IPv4Address, gateway: IPv4Address, datagrams: socket.socket
    ) -> None:
        self.address = address
        self.gateway = gateway
        self.socket = datagrams
        self.limits = QueryLimits()
        self.resume: asyncio.TimerHandle | None = None


Resolve = Callable[[DnsGuest, bytes, bool], Awaitable[bytes | None]]
"""Returns the answer to a guest's message; None for no answer.

The last argument is True for TCP.
"""


class DnsServer:
    """Serves guests from `serve` to `stop`, within `running`."""

    def __init__(self, gateway: IPv4Address, resolve: Resolve) -> None:
        self._gateway = gateway
        self._resolve = resolve
        self._guests: dict[IPv4Address, DnsGuest] = {}
        self._listeners: dict[IPv4Address, asyncio.Future[None]] = {}
        """The tasks that serve TCP, by gateway. The built-in network's gateway is served by
        `running`.
        """
        self._bucket = TokenBucket(RATE_HZ, BURST)
        self._busy = 0
        self._tasks: Background | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve TCP on the gateway of the built-in network; `serve` works within this context.

        Raises:
            OSError: another server has port 53.
        """
        _datagrams(self._gateway).close()
        listener = _listener(self._gateway)
        async with background() as tasks:
            server = await asyncio.start_server(
                self._connected, sock=listener, limit=2 * MAX_QUERY_BYTES
            )
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                server.close()
                for address in list(self._guests):
                    self.stop(address)

    def serve(self, address: IPv4Address, gateway: IPv4Address | None = None) -> None:
        """Answer the guest with this address.

        No effect outside `running`, or if it is served already.

        `gateway` is the address to which the guest sends queries (default: the built-in network's).
        """
        if self._tasks is None or address in self._guests:
            return
        gateway = gateway or self._gateway
        datagrams = _datagrams(gateway)
        try:
            datagrams.connect((str(address), 0))  # any port of the guest
        except OSError:
            datagrams.close()
            raise
        guest = self._guests[address] = DnsGuest(address, gateway, datagrams)
        self._listen(guest)
        if gateway != self._gateway and gateway not in self._listeners:
            self._listeners[gateway] = self._tasks.start(self._listening(gateway))

    def stop(self, address: IPv4Address) -> None:
        guest = self._guests.pop(address, None)
        if guest is None:
            return
        if guest.resume is not None:
            guest.resume.cancel()
        asyncio.get_running_loop().remove_reader(guest.socket)
        guest.socket.close()
        if all(other.gateway != guest.gateway for other in self._guests.values()):
            listener = self._listeners.pop(guest.gateway, None)
            if listener is not None:
                listener.cancel()

    # --- datagrams ------------------------------------------------------------------------
    def _listen(self, guest: DnsGuest) -> None:
        guest.resume = None
        asyncio.get_running_loop().add_reader(guest.socket, self._readable, guest)

    def _pause(self, guest: DnsGuest, wait_s: float) -> None:
        """While this process does not read, the kernel drops the flood at no cost to it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(guest.socket)
        guest.resume = loop.call_later(wait_s, self._listen, guest)

    def _readable(self, guest: DnsGuest) -> None:
        now_s = asyncio.get_running_loop().time()
        if guest.limits.is_full(crowded=self._busy >= CROWDED):
            self._pause(guest, FULL_WAIT_S)
            return
        wait_s = guest.limits.wait_s(now_s) or self._bucket.take(now_s)
        if wait_s:
            self._pause(guest, wait_s)
            return
        try:
            message, source = guest.socket.recvfrom(MAX_QUERY_BYTES + 1)
        except OSError:  # also an error of an earlier answer, such as ECONNREFUSED
            return
        # another guest's datagram may have arrived between bind and connect
        if source[0] == str(guest.address) and self._tasks is not None:
            self._tasks.start(self._datagram(guest, message, source))

    async def _datagram(self, guest: DnsGuest, message: bytes, source: tuple[str, int]) -> None:
        answer = await self._answer(guest, message, tcp=False)
        if answer is not None:
            with suppress(OSError):  # the guest is gone, or reads too slowly
                guest.socket.sendto(answer, source)

    async def _answer(self, guest: DnsGuest, message: bytes, *, tcp: bool) -> bytes | None:
        self._busy += 1
        guest.limits.busy += 1
        try:
            return await self._resolve(guest, message, tcp)
        except Exception:
            extra = {"code": "dns_failed", "guest": str(guest.address)}
            log.exception("a DNS query was not answered", extra=extra)
            return None
        finally:
            self._busy -= 1
            guest.limits.busy -= 1

    # --- connections ----------------------------------------------------------------------
    async def _listening(self, gateway: IPv4Address) -> None:
        try:
            server = await asyncio.start_server(
                self._connected, sock=_listener(gateway), limit=2 * MAX_QUERY_BYTES
            )
        except OSError as error:
            extra = {"code": "dns_tcp"}
            log.warning("no DNS by TCP on %s: %s", gateway, error, extra=extra)
            return
        async with server:
            await server.serve_forever()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        guest = self._guests.get(IPv4Address(peer[0])) if peer else None
        if guest is None or guest.limits.connections >= CONNECTIONS or self._tasks is None:
            writer.transport.abort()
            return
        guest.limits.connections += 1
        self._tasks.start(self._converse(guest, reader, writer))

    async def _converse(
        self, guest: DnsGuest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while await self._exchange(guest, reader, writer):
                pass
            writer.close()
            async with asyncio.timeout(IDLE_S):
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            return
        finally:
            guest.limits.connections -= 1
            writer.transport.abort()

    async def _exchange(
        self, guest: DnsGuest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Return False if the connection must end."""
        async with asyncio.timeout(IDLE_S):
            head = await reader.read(2)
            if head and len(head) < 2:
                head += await reader.readexactly(1)
            size = int.from_bytes(head, "big")
            if not 0 < size <= MAX_QUERY_BYTES:
                return False  # the guest has closed the connection, or it sends no DNS
            message = await reader.readexactly(size)
        now_s = asyncio.get_running_loop().time()
        await asyncio.sleep(guest.limits.wait_s(now_s) or self._bucket.take(now_s))
        answer = await self._answer(guest, message, tcp=True)
        if answer is None:
            return False
        async with asyncio.timeout(IDLE_S):
            writer.write(len(answer).to_bytes(2, "big") + answer)
            await writer.drain()
        return True


def _datagrams(gateway: IPv4Address) -> socket.socket:
    datagrams = _bound(gateway, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return datagrams


def _listener(gateway: IPv4Address) -> socket.socket:
    listener = _bound(gateway, socket.SOCK_STREAM)
    try:
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _bound(gateway: IPv4Address, kind: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        bound.bind((str(gateway), PORT))
    except OSError:
        bound.close()
        raise
    return bound
