"""TLS listener whose certificate and CA can be replaced while it is open."""

import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from aiohttp import web

from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.edge.web.connections import Connections
from virtbus.kubebridge.edge.web.error_middleware import Handler

BACKLOG = 1024
SHUTDOWN_S = 1.0
"""Seconds that open requests get to end after the listener closes. A console would never end."""


class TlsListener:
    """The port's certificate, and the CA of its clients.

    Before the port has a certificate, no client can connect. A client may come without a
    certificate, as API servers do when they call webhooks. A certificate that the CA did not sign
    fails the handshake. A connection keeps the settings with which it was made.
    """

    def __init__(self) -> None:
        self._pair: tuple[bytes, bytes] | None = None
        self._ca = ""
        self._now: ssl.SSLContext | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.verify_mode = ssl.CERT_OPTIONAL
        # Forbid resumed sessions: a resumed session does not verify the client's certificate again,
        # even after the CA was replaced. TLS 1.2 can resume a session without a ticket, so 1.3 is
        # required.
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.options |= ssl.OP_NO_TICKET
        self.context.num_tickets = 0
        self.context.sni_callback = self._choose

    def show(self, certificate: Path, key: Path) -> None:
        """Serve this certificate (with its chain) and key from now on. Both are PEM files.

        Raises:
            OSError: a file cannot be read.
            ssl.SSLError: the files are not PEM, or do not belong together. The port keeps its
                certificate.
        """
        pair = certificate.read_bytes(), key.read_bytes()
        self._now = _context(pair, self._ca)
        self._pair = pair

    def trust(self, ca: str) -> None:
        """Accept clients' certificates from this CA (PEM) from now on; from no CA if `ca` is empty.

        Raises:
            ssl.SSLError: `ca` is not a certificate. The port keeps its old CA.
        """
        if ca:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=ca)
        if self._pair is not None:
            self._now = _context(self._pair, ca)
        self._ca = ca

    def _choose(
        self, connection: ssl.SSLObject, _name: str | None, _old: ssl.SSLContext
    ) -> int | None:
        if self._now is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._now
        return None


def _context(pair: tuple[bytes, bytes], ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    with in_memory(pair[0]) as certificate, in_memory(pair[1]) as key:
        context.load_cert_chain(certificate, key)
    if ca:
        context.load_verify_locations(cadata=ca)
    return context


@contextmanager
def in_memory(data: bytes) -> Iterator[Path]:
    """Yield the path of a file that is only in memory, and exists while the context is open."""
    file = os.memfd_create("virtbus-tls", os.MFD_CLOEXEC)
    try:
        os.write(file, data)
        yield Path(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


@asynccontextmanager
async def serving(
    app: web.Application, host: str, port: int, tls: TlsListener
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open. Yield the address; `port` 0 means any free port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)

    @web.middleware
    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.asked(request.transport)
        return await handler(request)

    app.middlewares.append(noted)
    await runner.setup()
    assert runner.server is not None  # noqa: S101  it is set up
    connections = Connections(runner.server, tls.context)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=BACKLOG) as listener:
            listener.setblocking(False)
            bound = listener.getsockname()
            async with background() as tasks:
                tasks.start(connections.accept(listener))
                yield bound[0], bound[1]
    finally:
        await runner.cleanup()
