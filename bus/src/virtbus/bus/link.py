"""What the parts of the bus need of a connection, in terms that name no library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from virtbus.bus.ports import BusError


class LinkLostError(BusError):
    """The connection ended after something was sent and before the answer came."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as it came. `status` is the server's (`100` heartbeat, `404`, `503`), or empty."""

    subject: str
    body: bytes = b""
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return self.headers.get("Status", "")


Receive = Callable[[Raw], None]
"""Takes a message; must not block or raise."""


class Subscription(Protocol):
    """An open subscription; it survives reconnects."""

    async def close(self) -> None:
        """End it; nothing is delivered any more."""


class Link(Protocol):
    """A supervised connection: lost ones are rebuilt, with every subscription.

    `generation` counts connections made, so that a watch sees that there was a new one.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def clustered(self) -> bool:
        """True when the server is a member of a cluster."""

    async def up(self, timeout_s: float) -> None:
        """Wait for a connection; UnavailableError when there is none in time."""

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Hand a message to the connection.

        Raises:
            UnavailableError: there is none, nothing was sent.
            FullError: larger than the server's max_payload.
        """

    async def ask(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Raw:
        """The first answer, whatever its status.

        Raises:
            UnavailableError, FullError: as `send`.
            LinkLostError: sent, then the connection ended.
            DeniedError: the server refuses this subject to us.
            TimeoutError: no answer in time.
        """

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> Subscription:
        """Subscribe; the server knows of it when this returns (where connected).

        Raises:
            DeniedError: the credentials do not allow it.
        """

    def inbox(self) -> str:
        """A new literal subject below our inbox prefix."""

    def on_change(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` whenever the connection is lost or made; returns what ends that."""
