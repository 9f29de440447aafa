"""One TCP connection to a NATS server: the socket under `protocol`."""

import contextlib
import select
import socket
import time
from collections.abc import Mapping

from virtbus.cli.wire import protocol
from virtbus.cli.wire.access import Access, ServerAddress
from virtbus.cli.wire.protocol import Info, Ping, Pong, Reader, ServerRefusal, WireMessage

CONNECT_TIMEOUT_S = 3.0
ONE_OF_MANY_S = 0.7
"""Time limit for one of several servers before the next is tried; a second round has more."""
SEND_TIMEOUT_S = 10.0
_CHUNK_BYTES = 256 * 1024


class LinkError(Exception):
    """The connection could not be made, or ended."""


class LoginDeniedError(Exception):
    """The server refuses: wrong credentials, or a subject that is not allowed."""


class Connection:
    """An open, authenticated connection. Not thread-safe; raises LinkError when it ends."""

    def __init__(self, sock: socket.socket, reader: Reader, server: Info) -> None:
        self._sock = sock
        self._reader = reader
        self.server = server
        self._last_sid = 0

    @classmethod
    def open(cls, access: Access) -> "Connection":
        """Connect to the first server that answers.

        Raises:
            LinkError: none does; the message names each with its cause.
            DeniedError: the server refuses the credentials.
        """
        causes: dict[str, str] = {}
        rounds = (ONE_OF_MANY_S, CONNECT_TIMEOUT_S)
        for patience_s in rounds if len(access.servers) > 1 else rounds[1:]:
            for address in access.servers:
                try:
                    return _open_one(address, access, patience_s)
                except (OSError, LinkError, protocol.ProtocolError) as error:
                    causes[f"{address.host}:{address.port}"] = _cause(error)
        raise LinkError("; ".join(f"{place}: {cause}" for place, cause in causes.items()))

    def fileno(self) -> int:
        return self._sock.fileno()

    def subscribe(self, subject: str) -> int:
        """Subscribe to `subject`; return the sid that marks its messages."""
        self._last_sid += 1
        self.send(protocol.subscribe_line(subject, self._last_sid))
        return self._last_sid

    def unsubscribe(self, sid: int) -> None:
        self.send(protocol.unsubscribe_line(sid))

    def publish(
        self,
        subject: str,
        body: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send(protocol.publish_bytes(subject, body, reply=reply, headers=headers))

    def send(self, data: bytes) -> None:
        """Write all of `data`, or raise LinkError."""
        try:
            self._sock.settimeout(SEND_TIMEOUT_S)
            self._sock.sendall(data)
        except OSError as error:
            raise LinkError(_cause(error)) from error

    def messages(self, timeout_s: float, also: int | None = None) -> list[WireMessage]:
        """Return received messages; if there are none, wait for one, or for `also` (a fd).

        Raises:
            LinkError: the connection ended.
            DeniedError: the server refused a subject.
        """
        found = self._parsed()
        if found:
            return found
        watched = [self.fileno()] if also is None else [self.fileno(), also]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        if self.fileno() in ready:
            self._read()
        return self._parsed()

    def flush(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Return when the server has handled everything sent; other messages are dropped."""
        self.send(b"PING\r\n")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            event = self._reader.next_event()
            if isinstance(event, Pong):
                return
            if event is None:
                self._sock.settimeout(max(0.01, deadline - time.monotonic()))
                self._read()
            else:
                self._handle(event)
        msg = "the server does not answer"
        raise LinkError(msg)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _parsed(self) -> list[WireMessage]:
        found: list[WireMessage] = []
        while (event := self._next()) is not None:
            if isinstance(event, WireMessage):
                found.append(event)
            else:
                self._handle(event)
        return found

    def _next(self) -> protocol.Event | None:
        try:
            return self._reader.next_event()
        except protocol.ProtocolError as error:
            raise LinkError(str(error)) from error

    def _handle(self, event: protocol.Event) -> None:
        if isinstance(event, Ping):
            self.send(b"PONG\r\n")
        elif isinstance(event, ServerRefusal):
            lowered = event.text.lower()
            if "permissions violation" in lowered or "authorization" in lowered:
                raise LoginDeniedError(event.text)
            raise LinkError(event.text)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except OSError as error:
            raise LinkError(_cause(error)) from error
        if not data:
            msg = "the server closed the connection"
            raise LinkError(msg)
        self._reader.feed(data)


def _open_one(address: ServerAddress, access: Access, patience_s: float) -> Connection:
    sock = socket.create_connection((address.host, address.port), patience_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = Reader()
        server = _greeting(sock, reader)
        if address.tls or access.ca or server.fields.get("tls_required"):
            sock = _encrypted(sock, address.host, access.ca)
        connection = Connection(sock, reader, server)
        connection.send(
            protocol.connect_line(_options(address, access, str(server.fields.get("nonce") or "")))
        )
        connection.flush(patience_s)
    except BaseException:
        sock.close()
        raise
    return connection


def _options(address: ServerAddress, access: Access, nonce: str) -> dict[str, object]:
    options: dict[str, object] = {
        "verbose": False,
        "pedantic": False,
        "lang": "python",
        "version": "0",
        "name": "virtbus-cli",
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "echo": False,
    }
    if access.nkey_seed and not address.user:
        from virtbus.bus.client import nkeys  # costs more than the rest of the start

        try:
            return options | {
                "nkey": nkeys.public(access.nkey_seed),
                "sig": nkeys.signed(access.nkey_seed, nonce),
            }
        except ValueError as error:
            msg = f"{access.source}: {error}"
            raise LinkError(msg) from None
    user = address.user or access.user
    if user:
        options |= {"user": user, "pass": address.password or access.password}
    return options


def _greeting(sock: socket.socket, reader: Reader) -> Info:
    while True:
        event = reader.next_event()
        if isinstance(event, Info):
            return event
        if event is not None:
            msg = "the server does not greet; is it a NATS server?"
            raise LinkError(msg)
        data = sock.recv(_CHUNK_BYTES)
        if not data:
            msg = "the server closed the connection before its greeting"
            raise LinkError(msg)
        reader.feed(data)


def _encrypted(sock: socket.socket, host: str, ca: str) -> socket.socket:
    import ssl  # 15 ms that most commands never need

    context = ssl.create_default_context(cadata=ca or None)
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        msg = f"its certificate is not trusted: {error.verify_message}"
        raise LinkError(msg) from None


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
