"""Keeps one connection to NATS. Only this module and `nats_client` import `nats`.

nats-py's own reconnect is off, because it sends buffered requests that have already failed. It also
leaves watches and closed clients broken (docs/explanation/architecture.md). After a lost
connection, this module makes a new client and subscribes again.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from virtbus.bus.client import connect_options
from virtbus.bus.client.import_shim import lean_import
from virtbus.bus.client.link import LinkLostError, Raw, Receive
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.nats_client import DirectClient, closed_is_reset, shut
from virtbus.bus.client.replies import Replies
from virtbus.bus.errors import BusError, DeniedError, UnavailableError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import background, wait_for_event

with lean_import():
    import nats.errors
    from nats.aio.subscription import Subscription as NatsSubscription

log = logging.getLogger(__name__)

ATTEMPT_S = 2.0
"""Time limit for connecting one new client. Within this time, nats-py tries the servers again."""
FLUSH_S = 5
CLOSE_S, GIVE_UP_S = 2.0, 0.3
"""Time limits for closing a client that was connected, and a client that never connected."""
LOOK_S = 1.0
"""Interval of checks for a closed client: nats-py does not always call closed_cb."""
_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"")


class _Subscribed:
    """A requested subscription. `live` is nats-py's handle of the subscription, if connected."""

    def __init__(self, link: "NatsLink", subject: str, queue: str, receive: Receive) -> None:
        self._link = link
        self.subject = subject
        self.queue = queue
        self.receive = receive
        self.live: NatsSubscription | None = None

    async def close(self) -> None:
        await self._link.forget(self)


class NatsLink:
    """Implements `Link` by a nats-py client. The background task `run` replaces a lost client."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._client: DirectClient | None = None
        self.generation, self.clustered = 0, False
        self._subscribed: set[_Subscribed] = set()
        self._replies = Replies()
        self._changed: set[Callable[[], None]] = set()
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._refused: set[str] = set()
        self.fault = ""
        """The reason for the last failure, as text for errors and logs."""
        self._mux = ""
        self._prefix = settings.inbox_prefix
        self._servers = settings.servers

    @property
    def connected(self) -> bool:
        return self._client is not None

    def inbox(self) -> str:
        return f"{self._prefix}.{secrets.token_hex(11)}"

    def on_change(self, notify: Callable[[], None]) -> Callable[[], None]:
        self._changed.add(notify)
        return lambda: self._changed.discard(notify)

    async def up(self, timeout_s: float) -> None:
        if self._client is not None:
            return
        if not await wait_for_event(self._up, max(0.0, timeout_s)):
            msg = f"the bus at {', '.join(self._servers)} does not answer: {self.fault}"
            raise UnavailableError(msg)

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        client = self._client
        if client is None:
            msg = f"no connection to the bus: {self.fault}"
            raise UnavailableError(msg)
        try:
            await client.send(subject, body, reply, headers or {})
        except (nats.errors.Error, OSError) as error:
            if not client.is_connected and client is self._client:
                self._lost.set()
            msg = f"cannot send: {error}"
            raise UnavailableError(msg) from error

    async def ask(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Raw:
        def send(token: str) -> Awaitable[None]:
            return self.send(subject, body, headers=headers, reply=self._mux + token)

        return await self._replies.to(subject, send, timeout_s=timeout_s)

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> _Subscribed:
        subscribed = _Subscribed(self, subject, queue, receive)
        self._subscribed.add(subscribed)
        try:
            await self._announce(subscribed)
        except BaseException:  # cancelled or denied: leave no subscription behind
            await self.forget(subscribed)
            raise
        return subscribed

    async def _announce(self, subscribed: _Subscribed) -> None:
        """Subscribe on the server and wait until the server has processed the subscription."""
        client, subject = self._client, subscribed.subject
        if client is None:
            return
        self._refused.discard(subject.lower())
        try:
            await self._subscribe(client, subscribed)
            await self._barrier(client)  # without it, an immediate request could get 503
        except TimeoutError:
            # If the client was replaced, the loss is known, and `_lost` belongs to the new client.
            if client is self._client:
                self.fault = f"no PONG in {FLUSH_S} s"
                self._lost.set()
        except (nats.errors.Error, OSError) as error:
            log.debug("subscription deferred until the next connection: %s", error)
        if subject.lower() in self._refused:
            msg = f"the credentials do not allow to subscribe to {subject}"
            raise DeniedError(msg)

    async def forget(self, subscribed: _Subscribed) -> None:
        self._subscribed.discard(subscribed)
        live, subscribed.live = subscribed.live, None
        if live is not None:  # possibly of a client that is still connecting
            with suppress(nats.errors.Error, OSError):
                await live.unsubscribe()

    # --- supervision ----------------------------------------------------------------------
    async def first(self) -> None:
        """Make the first connection; raise the errors of `connect`."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                for delay_s in delays(0.1, 1.0):
                    if await self._attempt():
                        return
                    if "certificate verify failed" in self.fault and len(self._servers) == 1:
                        msg = f"the bus at {self._servers[0]} is not trusted: {self.fault}"
                        raise DeniedError(msg)
                    if "authorization" in self.fault:
                        msg = "the bus refuses these credentials: do they belong to this server?"
                        raise DeniedError(msg)
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            msg = f"the bus at {', '.join(self._servers)} does not answer: {self.fault}"
            raise UnavailableError(msg) from None

    async def run(self) -> None:
        try:
            while True:
                await self._end()
                log.warning("bus lost: %s", self.fault, extra={"code": "bus_lost"})
                await self._close()
                for delay_s in delays(0.05, 3.0):
                    if await self._attempt():
                        break
                    await asyncio.sleep(delay_s)
                log.info("bus connected", extra={"code": "bus_connected"})
        finally:
            await self._close()

    async def _end(self) -> None:
        """Return when the client has closed, even if nats-py does not call closed_cb.

        nats-py flushes first. If the server is gone, the flush raises, and nats-py never calls
        closed_cb.
        """
        while self._client is not None and self._client.works and not self._lost.is_set():
            await wait_for_event(self._lost, LOOK_S)

    async def _close(self) -> None:
        client = self._client
        self._drop()
        if client is not None:
            await shut(client, CLOSE_S)

    def _drop(self) -> None:
        self._client = None
        self._up.clear()
        for subscribed in self._subscribed:
            subscribed.live = None
        self._replies.fail(LinkLostError, "the connection ended before the answer came")
        self._notify()

    def _notify(self) -> None:
        for notify in tuple(self._changed):
            notify()

    async def _attempt(self) -> bool:
        """Connect a new client with all subscriptions.

        Return False on failure, with the reason in `fault`.
        """
        lost = asyncio.Event()
        try:
            settings = self._settings.resolved()
            client = _client(settings)
            self._servers = settings.servers
        except (BusError, ValueError) as error:  # credentials are missing, or being replaced
            self.fault = str(error)
            return False
        self._prefix = settings.inbox_prefix
        self._mux = f"{self._prefix}.{secrets.token_hex(11)}."
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await self._greet(client, settings, lost)
                await client.listen(f"{self._mux}*", self._answered)
                for subscribed in tuple(self._subscribed):
                    await self._subscribe(client, subscribed)
                await self._barrier(client)
            if not lost.is_set():
                self._client, self._lost = client, lost
        except (nats.errors.Error, OSError, TimeoutError) as error:
            self.fault = str(error).lower() or self.fault or "no answer in time"
        finally:
            if self._client is not client:
                await shut(client, GIVE_UP_S)
        if self._client is not client:
            return False
        self.clustered = bool(client._server_info.get("cluster"))
        self.generation += 1
        self._up.set()
        self._notify()
        return True

    async def _greet(
        self, client: DirectClient, settings: BusSettings, lost: asyncio.Event
    ) -> None:
        """Connect; set `lost` when the connection ends. Raises nats-py's exceptions."""

        async def on_error(error: Exception) -> None:
            self._heard(error)

        async def on_closed() -> None:
            lost.set()

        with closed_is_reset():
            await client.connect(
                settings.servers,
                name=self._name,
                **connect_options.options(settings),
                inbox_prefix=settings.inbox_prefix,
                **connect_options.patience(settings),
                error_cb=on_error,
                closed_cb=on_closed,
            )
        if not client.is_connected:
            # After a garbled first PONG, the client stays in "connecting" and never sends.
            msg = "the greeting was garbled"
            raise nats.errors.Error(msg)

    @staticmethod
    async def _barrier(client: DirectClient) -> None:
        """Return when the server has processed everything that was sent.

        nats-py's flush sends PING at once, before data that the flusher task has not written yet.
        One turn of the event loop lets the flusher task run first.
        """
        await asyncio.sleep(0)
        # Shielded, because the PONG of a cancelled flush ends nats-py's read loop.
        error = await asyncio.shield(_flushed(client))
        if error is not None:
            raise error

    async def _subscribe(self, client: DirectClient, one: _Subscribed) -> None:
        one.live = await client.listen(one.subject, one.receive, one.queue)
        # A subscription that was closed during the await must not take its queue group's messages.
        if one not in self._subscribed:
            await self.forget(one)

    def _answered(self, raw: Raw) -> None:
        self._replies.came(raw.subject.rpartition(".")[2], raw)

    def _heard(self, error: Exception) -> None:
        """Handle an error from nats-py. An exception here would end nats-py's read loop."""
        self.fault = str(error) or type(error).__name__
        found = _VIOLATION.search(self.fault)
        if found is None:
            log.debug("nats: %s", self.fault)
            return
        verb, subject = found.groups()
        log.warning("denied: %s to %s", verb, subject, extra={"code": "bus_denied"})
        if verb == "subscription":
            self._refused.add(subject)
            return
        self._replies.fail(DeniedError, f"the credentials do not allow {subject}", subject)


async def _flushed(client: DirectClient) -> Exception | None:
    """Return the error. asyncio would log the traceback of one that nobody waits for any more."""
    try:
        with closed_is_reset():
            await client.flush(FLUSH_S)
    except Exception as error:  # noqa: BLE001  the caller raises it
        return error
    return None


def _client(settings: BusSettings) -> DirectClient:
    client = DirectClient()
    if settings.nkey_seed:  # nats-py's own login by nkey needs PyNaCl and a seed file
        client._public_nkey = connect_options.public_key(settings)
    return client


@asynccontextmanager
async def connect(settings: BusSettings, *, name: str) -> AsyncIterator[NatsBus]:
    """Connect while the context is open; the server lists the connection as `name`.

    Raises:
        UnavailableError: no server answered within `settings.connect_timeout_s`.
        DeniedError: the server rejects the credentials, or the only server's certificate is not
            trusted.
    """
    link = NatsLink(settings, name)
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        await asyncio.sleep(0)  # `run` must begin, because its end closes the client
        bus = NatsBus(link, settings.resolved(), name, tasks)
        try:
            yield bus
        finally:
            await bus.aclose()
