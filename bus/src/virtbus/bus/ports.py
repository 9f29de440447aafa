"""What a service may ask of the bus. `client.NatsBus` and `memory.MemoryBus` both keep this.

Keys are full subjects (`$KV.vm.n1.<uid>`); make them with `virtbus.schemas.subjects`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from virtbus.bus.sources import Sources

HISTORY_BYTES = 512 * 1024
"""Bodies of one `history`: it ends at the message that is over it."""


class BusError(Exception):
    """The bus did not do what was asked."""


class UnavailableError(BusError):
    """Nothing happened: no connection, no responder, or an election that outlasted the deadline."""


class OutcomeUnknownError(BusError):
    """The write or request may or may not have happened: repeat it with the same id (rule 6)."""


class ConflictError(BusError):
    """A compare-and-set lost: the key's last revision is not the expected one. Re-read, decide."""


class DeniedError(BusError):
    """The credentials do not allow this subject."""


class FullError(BusError):
    """The bucket or the message is over its size limit."""


class OversizeError(FullError):
    """A value larger than its kind may be written (`virtbus.schemas.bounds`); nothing was sent."""


class EntryKind(StrEnum):
    """What the last message of a key is."""

    PUT = "put"
    PURGE = "purge"
    """A marker: deleted, or expired by its TTL."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The last message of a key. `revision` is the stream sequence, `time_ns` the stream's time.

    `why` is what a purge's marker says; its `value` is empty.
    """

    key: str
    value: bytes
    revision: int
    kind: EntryKind = EntryKind.PUT
    time_ns: int = 0
    why: bytes = b""


class WatchMark(StrEnum):
    """What a watch says besides entries."""

    RESET = "reset"
    """A full list follows (first connect, reconnect, gap): forget what it does not name."""
    SYNCED = "synced"
    """The list is complete."""


@dataclass(frozen=True, slots=True)
class Message:
    """A core message. `reply` is empty when no answer is wanted."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: str = ""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stream's history (facts)."""

    subject: str
    body: bytes
    sequence: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Write:
    """One message of an atomic batch; `value` None is a purge. `expect`, `ttl_s` as in `put`.

    `why` is what a purge's marker says.
    """

    key: str
    value: bytes | None
    expect: int
    expect_over: str | None = None
    ttl_s: float | None = None
    why: bytes = b""


class Rendered(bytes):
    """An answer that is encoded already, as its request asks; it is sent as it is."""

    __slots__ = ()


@dataclass(slots=True)
class Request:
    """A request to an endpoint, opened: `data` is the envelope's, JSON or msgpack alike.

    `stream` sends a further reply to the requester's inbox (watch replies); the handler's return
    value is the last one, or none where it returns None after streaming. `deadline_s` is on the
    loop's clock (`loop.time()`). `account` is the account that asks, where it is another one than
    the service's; the server says it, so nobody can take another's.
    """

    subject: str
    data: Any
    id: str
    deadline_s: float
    reply: str
    traceparent: str | None
    wants_json: bool
    stream: Callable[[Any], Awaitable[None]]
    account: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """A consumer's lag: `pending` messages not delivered, `waiting` pull requests."""

    name: str
    pending: int
    waiting: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """A stream's state; `fill` is bytes over max_bytes, 0.0 where unbounded."""

    name: str
    messages: int
    fill: float
    replicas: int
    consumers: tuple[ConsumerReport, ...] = ()
    current: int = 1
    """How many of its copies are there and up to date."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a stream reaches: first and last sequence, messages, bytes; `max_bytes` 0: no end."""

    first: int
    last: int
    messages: int
    bytes: int
    max_bytes: int


Handler = Callable[[Request], Awaitable[Any]]

Gate = Callable[[], Awaitable[None]]
"""Returns once a list may begin; what it raises ends the watch, unless it is a BusError."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`name` in ADR-32's INFO; `queue` None lets every instance answer; `limit` requests at once.

    Over `limit`, up to `backlog` wait; beyond that the answer is 429 with `after_ms`. One account
    has at most three quarters of either (`shares`).
    """

    name: str
    subject: str
    handler: Handler
    queue: str | None = "q"
    limit: int = 64
    backlog: int = 1024


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What ADR-32's INFO shows."""

    name: str
    version: str
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class Watch(Protocol):
    """An iterator of entries and marks. It never ends by itself; leaving its context stops it."""

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]: ...

    def relist(self) -> None:
        """Ask for a full list (RESET … SYNCED) soon; changes keep coming."""


class Bus(Protocol):
    """One connection. All methods are safe to cancel; a cancelled write has an unknown outcome."""

    @property
    def connected(self) -> bool: ...

    @property
    def sources(self) -> Sources:
        """Wall clock, randomness and ids, for all that has this bus."""

    # --- core -----------------------------------------------------------------------------
    async def publish(self, subject: str, value: Any) -> None:
        """Send `value` (a model or plain value, as msgpack in an envelope). May be lost.

        Never raises for a lost connection: what is published on core is droppable.
        """

    def subscribe(self, subject: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Messages of a subject; bounded, the oldest are dropped when the reader is slow."""

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """The answer's data. While nobody responds: repeats with the same id, inside the deadline.

        Raises:
            VirtbusError: what the service answered.
            UnavailableError: nobody got the request (no responders, no connection).
            OutcomeUnknownError: time ran out.
        """

    def request_stream(
        self, subject: str, value: Any, *, idle_timeout_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """The data of many replies to one request (watches); raises VirtbusError as `request`.

        Raises UnavailableError when nothing comes for `idle_timeout_s`.
        """

    def serve(
        self, info: ServiceInfo, endpoints: Sequence[Endpoint]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests while the context is open (ADR-32 PING, INFO, STATS included).

        A VirtbusError that a handler raises becomes the answer with ADR-32's error headers; any
        other exception is logged and becomes 500 without its text.
        """

    # --- records --------------------------------------------------------------------------
    async def get(self, key: str) -> Entry | None:
        """The last message of `key` (may hold `*`) read from the leader; None where there is none.

        A purge marker is an Entry of kind PURGE.
        """

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        expect_over: str | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Store and return the revision, after it is durable.

        `expect` is the last revision of `key` (0: none), or with `expect_over` of that filter.

        Raises:
            ConflictError, UnavailableError, OutcomeUnknownError, DeniedError, FullError;
            OversizeError where the value is larger than its kind may be.
        """

    async def purge(
        self,
        key: str,
        *,
        expect: int | None = None,
        marker_ttl_s: float | None = None,
        why: bytes = b"",
    ) -> int:
        """Replace all of `key` by a purge marker that says `why`; its revision. Errors as `put`."""

    async def batch(self, writes: Sequence[Write]) -> int:
        """All of `writes` or none (ADR-50); the last revision. Errors as `put`."""

    def watch(self, *filters: str) -> AbstractAsyncContextManager[Watch]:
        """An ordered watch over one bucket: RESET, the last of each key, SYNCED, then changes."""

    def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AbstractAsyncContextManager[Watch]:
        """The same over `$KV.vm.<node>.>` by the node's pre-made consumer (rule 7).

        All that has the node's credentials shares that consumer, and each list rewinds it: `gate`
        is passed before each.
        """

    async def fill(self, bucket: str) -> float:
        """How full a bucket (`vm`, `st`, …) is: bytes over max_bytes, 0.0-1.0."""

    async def extent(self, subject_filter: str) -> Extent:
        """How far the stream that holds `subject_filter` reaches."""

    async def trim(self, subject_filter: str, *, keep: int = 0) -> None:
        """Remove what is stored under `subject_filter`, but the newest `keep`; leaves no marker."""

    async def report(self) -> list[StreamReport]:
        """The declared streams and their consumers; needs a role that may read stream info."""

    # --- facts ----------------------------------------------------------------------------
    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        """Store a fact soon: queued, bounded, retried.

        What this connection emits twice within ten minutes, with the same subject and
        `message_id`, is stored once. Two processes may store the same: readers compare the ids.
        One that is larger than an event may be loses texts and details (`schemas.fitting`).
        """

    def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> Awaitable[list[StoredMessage]]:
        """Stored facts of a filter in order, with a sequence above `after`.

        At most `limit`, and about HISTORY_BYTES: ask for what follows after the last one.
        """

    async def aclose(self) -> None:
        """Flush facts (2 s at most), stop everything, disconnect."""
