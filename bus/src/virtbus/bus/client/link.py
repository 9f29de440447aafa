"""Defines `Link`, the interface of a NATS connection, independent of a NATS library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from virtbus.bus.errors import BusError

SEQUENCE = "Nats-Sequence"
"""A message's sequence in its stream, in the answer to a direct get."""


class LinkLostError(BusError):
    """The connection ended after something was sent and before the answer came."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A received message."""

    subject: str
    body: bytes = b""
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Return the NATS status (`100` heartbeat, `404`, `503`); empty in a stored message.

        A sender can put any status into a message that it stores. A consumer delivers a stored
        message with a reply subject, and a direct get with the header `Nats-Sequence`, which the
        server sets last. The server's own statuses have neither.
        """
        if self.reply or SEQUENCE in self.headers:
            return ""
        return self.headers.get("Status", "")


Receive = Callable[[Raw], None]
"""A callback for received messages; it must not block or raise."""


class Subscription(Protocol):
    """An open subscription; it survives reconnects."""

    async def close(self) -> None:
        """End the subscription; no more messages are delivered."""


class Link(Protocol):
    """A supervised connection: after a loss it is made again, with every subscription.

    `generation` counts the connections made, so that a watch notices a new connection.
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
            UnavailableError: there is no connection, or a subject is invalid; nothing was sent.
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
        """Send a request and return the first answer, with any status.

        Raises:
            UnavailableError, FullError: as `send`.
            LinkLostError: the request was sent, then the connection ended.
            DeniedError: the credentials do not allow this subject.
            TimeoutError: no answer in time.
        """

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> Subscription:
        """Subscribe; if connected, the subscription is effective on return.

        Raises:
            DeniedError: the credentials do not allow a subscription to `subject`.
        """

    def inbox(self) -> str:
        """Return a new subject without wildcards below our inbox prefix."""

    def on_change(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` whenever the connection is lost or made.

        Return a function that removes `notify`.
        """
