"""The interface of the bus for services. `client.NatsBus` and `memory.MemoryBus` implement it.

Keys are full subjects (`$KV.vm.n1.<uid>`); make them with `virtbus.schemas.subjects`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from virtbus.bus.runtime.sources import Sources
from virtbus.schemas.wire import MAX_NODES

HISTORY_BYTES = 512 * 1024
"""Size limit of the bodies of one `history`; the message that exceeds it is the last."""


class EntryKind(StrEnum):
    """The kind of a key's last message."""

    PUT = "put"
    PURGE = "purge"
    """A marker of a delete, or of an expired TTL."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The last message of a key. `revision` is the stream sequence, `time_ns` the stream's time.

    `why` is the reason in a purge marker, whose `value` is empty.
    """

    key: str
    value: bytes
    revision: int
    kind: EntryKind = EntryKind.PUT
    time_ns: int = 0
    why: bytes = b""


class WatchMark(StrEnum):
    """The output of a watch other than entries."""

    RESET = "reset"
    """A full list follows (first connect, reconnect, gap): drop keys that it does not contain."""
    SYNCED = "synced"
    """The list is complete."""


@dataclass(frozen=True, slots=True)
class Message:
    """A core message. `reply` is empty if no answer is wanted."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: str = ""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stream's history (events)."""

    subject: str
    body: bytes
    sequence: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Write:
    """One message of an atomic batch; `value` None is a purge. `expect`, `ttl_s` as in `put`.

    `why` is the reason in a purge marker.
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
    """A decoded request to an endpoint: `data` is the envelope's, from JSON or msgpack.

    `stream` sends a further reply to the requester's inbox (watch replies). The handler's return
    value is the last reply; None after streaming means no last reply. `deadline_s` is on the loop's
    clock (`loop.time()`). `account` is the requester's account if it is not the service's own. The
    server sets it, so it cannot be forged.
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
    """A stream's state; `fill` is bytes over max_bytes, 0.0 if unbounded."""

    name: str
    messages: int
    fill: float
    replicas: int
    consumers: tuple[ConsumerReport, ...] = ()
    current: int = 1
    """Number of replicas that are online and up to date."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a stream: first and last sequence, messages, bytes.

    `max_bytes` 0: unlimited.
    """

    first: int
    last: int
    messages: int
    bytes: int
    max_bytes: int


Handler = Callable[[Request], Awaitable[Any]]

Gate = Callable[[], Awaitable[None]]
"""Returns once a list may begin. An exception other than BusError ends the watch."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint. `name` is for ADR-32's INFO; `queue` None lets every instance answer.

    A handler may answer by `Request.stream` and return a future. The request is parked then: it
    keeps its slot until the future is done, and costs no task.

    A request has at most `most_values` values. `limit` requests have a slot, and at most `running`
    of their handlers run at once (None: all); parked ones run none. Up to `backlog` more wait for a
    slot; beyond that the answer is 429 with `after_ms`. One account has at most three quarters of
    the slots, and of the backlog (`fair_shares`). `displace` ends a parked request of an account
    that has no slot left, so that a new one of it takes the slot; it returns False if none may be
    ended.
    """

    name: str
    subject: str
    handler: Handler
    queue: str | None = "q"
    limit: int = 64
    running: int | None = None
    backlog: int = 1024
    most_values: int = MAX_NODES
    displace: Callable[[str], bool] = lambda _account: False


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The content of ADR-32's INFO."""

    name: str
    version: str
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class Watch(Protocol):
    """An iterator of entries and marks. It never ends by itself; leaving its context stops it."""

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]: ...

    def relist(self) -> None:
        """Request a full list (RESET … SYNCED) soon; changes keep arriving."""


class Bus(Protocol):
    """One connection. All methods are safe to cancel; a cancelled write has an unknown outcome."""

    @property
    def connected(self) -> bool: ...

    @property
    def sources(self) -> Sources:
        """Return wall clock, randomness and ids, for all users of this bus."""

    # --- core -----------------------------------------------------------------------------
    async def publish(self, subject: str, value: Any) -> None:
        """Send `value` (a model or plain value, as msgpack in an envelope). It may be lost.

        A lost connection raises nothing: core messages are droppable.
        """

    def subscribe(self, subject: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive messages of a subject. The queue is bounded; the oldest are dropped."""

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """Return the answer's data.

        Without a responder: repeat with the same id until the deadline.

        Raises:
            VirtbusError: the service's error.
            UnavailableError: nobody received the request (no responders, no connection).
            OutcomeUnknownError: the time limit was reached.
        """

    def request_stream(
        self, subject: str, value: Any, *, idle_timeout_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Receive the data of many replies to one request (watches).

        Raises VirtbusError as `request`.

        Raises UnavailableError if nothing arrives for `idle_timeout_s`.
        """

    def serve(
        self, info: ServiceInfo, endpoints: Sequence[Endpoint]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests while the context is open (ADR-32 PING, INFO, STATS included).

        A VirtbusError of a handler becomes the answer, with ADR-32's error headers. Any other
        exception is logged and becomes 500 without its text.
        """

    # --- records --------------------------------------------------------------------------
    async def get(self, key: str) -> Entry | None:
        """Return the last message of `key` (may hold `*`), read from the leader.

        None if there is none.

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
        """Store the value and return its revision, once it is durable.

        `expect` is the last revision of `key` (0: none), or with `expect_over` of that filter.

        Raises:
            ConflictError, UnavailableError, OutcomeUnknownError, DeniedError, FullError.
            OversizeError: the value is larger than its kind may be.
        """

    async def purge(
        self,
        key: str,
        *,
        expect: int | None = None,
        marker_ttl_s: float | None = None,
        why: bytes = b"",
    ) -> int:
        """Replace all of `key` by a purge marker with `why`; return its revision.

        Errors as `put`.
        """

    async def batch(self, writes: Sequence[Write]) -> int:
        """Store all of `writes` or none (ADR-50); return the last revision. Errors as `put`."""

    def watch(self, *filters: str) -> AbstractAsyncContextManager[Watch]:
        """Watch one bucket in order: RESET, the last of each key, SYNCED, then changes."""

    def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AbstractAsyncContextManager[Watch]:
        """Watch `$KV.vm.<node>.>` in the same way, by the node's durable consumer.

        All holders of the node's credentials share that consumer, and each list rewinds it. So
        `gate` is awaited before each list.
        """

    async def fill(self, bucket: str) -> float:
        """Return the fill of a bucket (`vm`, `st`, …): bytes over max_bytes, 0.0-1.0."""

    async def extent(self, subject_filter: str) -> Extent:
        """Return the extent of the stream that holds `subject_filter`."""

    async def trim(self, subject_filter: str, *, keep: int = 0) -> None:
        """Remove messages under `subject_filter`, except the newest `keep`; leaves no marker."""

    async def report(self) -> list[StreamReport]:
        """Return the declared streams and their consumers; needs permission for stream info."""

    # --- events ------------------------------------------------------------------------------
    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        """Store an event in the background: queued, bounded, retried.

        Within ten minutes this connection stores an event with the same subject and `message_id`
        only once. Two processes may store the same event, so readers compare the ids. An event that
        is too large loses texts and details (`schemas.fitting`).
        """

    def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> Awaitable[list[StoredMessage]]:
        """Return stored events of a filter in order, with a sequence above `after`.

        The result has at most `limit` events and about HISTORY_BYTES. Ask again after the last one.
        """

    async def aclose(self) -> None:
        """Flush events (2 s at most), stop everything, disconnect."""
