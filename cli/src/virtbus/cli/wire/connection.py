"""Implements the CLI's connection to a NATS server, with a blocking socket."""

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from virtbus.bus.client.nats_protocol import MalformedError, publication
from virtbus.cli.wire.access import Access, ServerAddress
from virtbus.cli.wire.protocol import Line, Reader, WireMessage, connect_line, info_of

CONNECT_TIMEOUT_S = 3.0
ONE_OF_MANY_S = 0.7
"""Time limit per server in the first round, if there are several servers. The second round uses
CONNECT_TIMEOUT_S."""
SEND_TIMEOUT_S = 10.0
PAYLOAD_BYTES = 1024 * 1024
"""Maximum size of a message if the server announces none."""
_CHUNK_BYTES = 256 * 1024


class LinkError(Exception):
    """The connection could not be made, or ended."""


class LoginDeniedError(Exception):
    """The server refused the credentials, or a subject that the credentials do not allow."""


class Connection:
    """An authenticated connection. Its methods raise LinkError after its end."""

    def __init__(self, sock: socket.socket, reader: Reader, server: Mapping[str, Any]) -> None:
        self._sock = sock
        self._reader = reader
        self.server = server
        self._last_sid = 0

    @classmethod
    def open(cls, access: Access) -> "Connection":
        """Connect to the first server that answers.

        Raises:
            LinkError: no connection could be made; the message names each server with its cause.
            LoginDeniedError: the server refuses the credentials.
        """
        causes: dict[str, str] = {}
        rounds = (ONE_OF_MANY_S, CONNECT_TIMEOUT_S)
        for patience_s in rounds if len(access.servers) > 1 else rounds[1:]:
            for address in access.servers:
                try:
                    return _open_one(address, access, patience_s)
                except (OSError, LinkError, MalformedError) as error:
                    causes[f"{address.host}:{address.port}"] = _cause(error)
        raise LinkError("; ".join(f"{place}: {cause}" for place, cause in causes.items()))

    def fileno(self) -> int:
        return self._sock.fileno()

    def subscribe(self, subject: str) -> int:
        """Subscribe to `subject`; return the subscription id that its messages have."""
        self._last_sid += 1
        self.send(f"SUB {subject} {self._last_sid}\r\n".encode())
        return self._last_sid

    def publish(
        self,
        subject: str,
        body: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Publish a message.

        Raises:
            FullError: the message is larger than the server accepts.
            MalformedError: a subject cannot be sent.
        """
        most_bytes = int(self.server.get("max_payload") or PAYLOAD_BYTES)
        self.send(publication(subject, body, reply, headers or {}, most_bytes))

    def send(self, data: bytes) -> None:
        try:
            self._sock.settimeout(SEND_TIMEOUT_S)
            self._sock.sendall(data)
        except OSError as error:
            raise LinkError(_cause(error)) from error

    def messages(self, timeout_s: float, also: int | None = None) -> list[WireMessage]:
        """Return the received messages. If there are none, wait up to `timeout_s` for a message.

        The wait also ends when the file descriptor `also` is readable.

        Raises:
            LinkError: the connection ended.
            LoginDeniedError: the server refused a subject.
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
        """Wait until the server has processed everything sent; drop messages received meanwhile."""
        self.send(b"PING\r\n")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            event = self._next()
            if event is None:
                self._sock.settimeout(max(0.01, deadline - time.monotonic()))
                self._read()
            elif isinstance(event, Line):
                self._handle(event)
                if event.verb == "PONG":
                    return
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

    def _next(self) -> WireMessage | Line | None:
        try:
            return self._reader.next_event()
        except MalformedError as error:
            raise LinkError(str(error)) from error

    def _handle(self, line: Line) -> None:
        if line.verb == "PING":
            self.send(b"PONG\r\n")
        elif line.verb == "-ERR":
            text = line.text.strip().strip("'")
            if "permissions violation" in text.lower() or "authorization" in text.lower():
                raise LoginDeniedError(text)
            raise LinkError(text)

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
        if address.tls or access.ca or server.get("tls_required"):
            sock = _encrypted(sock, address.host, access.ca)
        connection = Connection(sock, reader, server)
        connection.send(connect_line(_options(address, access, str(server.get("nonce") or ""))))
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
        from virtbus.bus.client import nkeys  # slow import

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


def _greeting(sock: socket.socket, reader: Reader) -> dict[str, Any]:
    while (event := reader.next_event()) is None:
        data = sock.recv(_CHUNK_BYTES)
        if not data:
            msg = "the server closed the connection before its greeting"
            raise LinkError(msg)
        reader.feed(data)
    return info_of(event if isinstance(event, Line) else Line("MSG"))


def _encrypted(sock: socket.socket, host: str, ca: str) -> socket.socket:
    import ssl  # the import takes 15 ms

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
