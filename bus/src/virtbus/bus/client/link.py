"""Defines `Link`, the interface of a NATS connection, independent of a NATS library."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from virtbus.bus.errors import BusError

SEQUENCE = "Nats-Sequence"
"""A message's sequence in its stream, in the answer to a direct get."""


class LinkLostError(BusError):
    """The connection ended after something was sent and before the answer came."""


class Raw(NamedTuple):
    """A received message."""

    subject: str
    body: bytes = b""
    reply: str = ""
    headers: Mapping[str, str] = MappingProxyType({})

    @property
    def status(self) -> str:
        """Return the NATS status (`100` heartbeat, `404`, `503`); empty in a stored message.

        The sender of a stored message can forge a status. A consumer delivers a stored message with
        a reply subject, and a direct get with the header `Nats-Sequence`. The server sets this
        header last. The server's own statuses have neither.
        """
        if self.reply or SEQUENCE in self.headers:
            return ""
        return self.headers.get("Status", "")


Receive = Callable[[Raw], None]
"""A callback for received messages; it must not block or raise."""


class Subscription(Protocol):
    """An open subscription. It survives reconnects."""

    async def close(self) -> None:
        """End the subscription; no more messages are delivered."""


class Link(Protocol):
    """A connection that is made again after a loss, with all its subscriptions.

    `generation` counts the connections, so that a watch notices a new connection.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def clustered(self) -> bool:
        """Return True if the server is a member of a cluster."""

    async def up(self, timeout_s: float) -> None:
        """Wait for a connection; raise UnavailableError if there is none in time."""

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Pass a message to the connection.

        Raises:
            UnavailableError: nothing was sent: no connection, or an invalid subject.
            FullError: the message is larger than the server's max_payload.
        """

    async def ask(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Raw:
        """Send a request; return the first answer, with any NATS status.

        Raises:
            UnavailableError, FullError: as `send`.
            LinkLostError: the request was sent, then the connection ended.
            DeniedError: the credentials do not allow this subject.
            TimeoutError: no answer in time.
        """

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> Subscription:
        """Subscribe. While connected, the subscription is effective on return.

        Raises:
            DeniedError: the credentials do not allow a subscription to `subject`.
        """

    def inbox(self) -> str:
        """Return a new subject below the inbox prefix of the credentials."""

    def on_change(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` whenever the connection is lost or made.

        Return a function that removes `notify`.
        """
