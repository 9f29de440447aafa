"""Defines `Bus`, through which services use the bus. `NatsBus` and `MemoryBus` implement it.

Keys are full subjects (`$KV.vm.n1.<uid>`). `virtbus.schemas.subjects` builds them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from virtbus.bus.runtime.sources import Sources
from virtbus.schemas.wire import MAX_NODES

HISTORY_BYTES = 512 * 1024
"""Size limit of a `history`. The first message that exceeds the limit is still returned."""


class EntryKind(StrEnum):
    """The kind of a key's last message."""

    PUT = "put"
    PURGE = "purge"
    """A purge marker, left by a delete or an expired TTL."""


class Entry(NamedTuple):
    """The last message of a key. `revision` is its stream sequence, `time_ns` its Unix time.

    A purge marker has an empty `value`; `why` is the reason of the delete.
    """

    key: str
    value: bytes
    revision: int
    kind: EntryKind = EntryKind.PUT
    time_ns: int = 0
    why: bytes = b""


class WatchMark(StrEnum):
    """The marks that a watch yields between entries."""

    RESET = "reset"
    """A full list follows, for example after a reconnect. Keys missing in the list are gone."""
    SYNCED = "synced"
    """The list is complete."""


class Message(NamedTuple):
    """A core message. `reply` is empty if no answer is wanted."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})
    reply: str = ""


class StoredMessage(NamedTuple):
    """A message of a stream, for example an event. `time_ns` is its Unix time."""

    subject: str
    body: bytes
    sequence: int
    time_ns: int


class Write(NamedTuple):
    """One message of an atomic batch, with the arguments of `Bus.put`.

    If `value` is None, the message is a purge marker with the reason `why`.
    """

    key: str
    value: bytes | None
    expect: int
    expect_over: str | None = None
    ttl_s: float | None = None
    why: bytes = b""


class Rendered(bytes):
    """An answer that is already encoded as JSON or msgpack."""

    __slots__ = ()


@dataclass(slots=True)
class Request:
    """A decoded request to an endpoint. `data` is the envelope's data, from JSON or msgpack.

    `stream` sends one of several replies to the requester's inbox. The handler's return value is
    the last reply. After `stream`, None means no further reply. `deadline_s` and `received_s` are
    times of `loop.time()`. `account` is the requester's account, empty for the controllers' own.
    The NATS server sets the account, so a requester cannot forge it.
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
    received_s: float = 0.0


class ConsumerReport(NamedTuple):
    """A consumer's state: `pending` undelivered messages, and `waiting` open pull requests."""

    name: str
    pending: int
    waiting: int


class StreamReport(NamedTuple):
    """A stream's state. `fill` is bytes divided by max_bytes; 0.0 without a limit."""

    name: str
    messages: int
    fill: float
    replicas: int
    consumers: tuple[ConsumerReport, ...] = ()
    current: int = 1
    """Number of replicas that are online and up to date."""


class Extent(NamedTuple):
    """The size of a stream. `first` and `last` are sequences; `max_bytes` 0 means no limit."""

    first: int
    last: int
    messages: int
    bytes: int
    max_bytes: int


Handler = Callable[[Request], Awaitable[Any]]

Gate = Callable[[], Awaitable[None]]
"""An async function that returns once a watch may list.

After a BusError, the watch calls the gate again. A DeniedError or any other exception ends the
watch.
"""


class Endpoint(NamedTuple):
    """One kind of requests of a service. `name` is for ADR-32's INFO.

    With `queue` None, each instance of the service answers a request.

    A handler may answer by `Request.stream` and return a future. The request is then parked: it
    needs no task, and keeps its slot until the future is done.

    A request with more than `most_values` values (nested values count) gets 400.

    Up to `limit` requests have a slot. At most `running` handlers run at once (None: `limit`). A
    parked request has no running handler. Up to `backlog` more requests wait for a slot. Further
    requests get 429 with `after_ms`. One account gets at most three quarters of the slots, and of
    the backlog (`fair_shares`).

    `displace` gets an account that can have no more slots. It may end a parked request of this
    account, so that the new request takes the slot. It returns False if it ended no request.
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


class ServiceInfo(NamedTuple):
    """The content of ADR-32's INFO."""

    name: str
    version: str
    description: str = ""
    metadata: Mapping[str, str] = MappingProxyType({})


class Watch(Protocol):
    """An endless iterator of entries and marks. The end of its context stops it."""

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]: ...

    def relist(self) -> None:
        """Request a full list (RESET … SYNCED). Changes still arrive until the list begins."""


class Bus(Protocol):
    """One connection. A task may cancel any method; a cancelled write has an unknown outcome."""

    @property
    def connected(self) -> bool: ...

    @property
    def sources(self) -> Sources:
        """Return the sources of time, random numbers and ids."""

    # --- core -----------------------------------------------------------------------------
    async def publish(self, subject: str, value: Any) -> None:
        """Send a model or plain value as msgpack in an envelope.

        The message may be lost. Without a connection the message is dropped without an error.
        """

    def subscribe(self, subject: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive messages of a subject. A full queue drops its oldest messages."""

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """Send a request and return the answer's data.

        The request is repeated with the same id until an answer arrives or `timeout_s` has passed.

        Raises:
            VirtbusError: the service's error.
            UnavailableError: no service received the request (no responder, no connection).
            OutcomeUnknownError: the request was sent, and no answer arrived in time.
            DeniedError, FullError: as `Link.ask`.
            BusError: the answer cannot be read.
        """

    def request_stream(
        self, subject: str, value: Any, *, idle_timeout_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Send one request; iterate over the data of its replies.

        Raises:
            VirtbusError: the service's error.
            UnavailableError: there is no responder, the connection was lost, too many replies are
                unread, or nothing arrived for `idle_timeout_s`.
            DeniedError, FullError: as `Link.ask`.
            BusError: a reply cannot be read.
        """

    def serve(
        self, info: ServiceInfo, endpoints: Sequence[Endpoint]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests while the context is open, also ADR-32's PING, INFO and STATS.

        A VirtbusError of a handler becomes the answer, with ADR-32's error headers. Any other
        exception is logged, and the answer is 500 without the exception's text.
        """

    # --- records --------------------------------------------------------------------------
    async def get(self, key: str) -> Entry | None:
        """Return the last message of `key` (may contain `*`); None if there is no message.

        A purge marker is an Entry of kind PURGE. Any replica answers a node's users, possibly
        without the last writes. The stream's leader answers all other users.
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
        """Store the value durably and return its revision.

        `expect` is the expected last revision of `key`, or of the filter `expect_over`. The
        revision 0 means that no message exists.

        Raises:
            ConflictError: the last revision is not `expect`.
            UnavailableError, OutcomeUnknownError, DeniedError, FullError: see `bus.errors`.
            OversizeError: the value exceeds the limit for keys of its kind.
        """

    async def purge(
        self,
        key: str,
        *,
        expect: int | None = None,
        marker_ttl_s: float | None = None,
        why: bytes = b"",
    ) -> int:
        """Replace all messages of `key` by a purge marker with the reason `why`.

        Return the marker's revision. Raises the errors of `put`.
        """

    async def batch(self, writes: Sequence[Write]) -> int:
        """Store all of `writes` or none (ADR-50); return the last revision.

        Raises the errors of `put`.
        """

    def watch(self, *filters: str) -> AbstractAsyncContextManager[Watch]:
        """Watch keys of one bucket: RESET, the last entry of each key, SYNCED, then changes.

        In a cluster, the list may lack the last acknowledged writes. They follow as changes.
        """

    def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AbstractAsyncContextManager[Watch]:
        """Watch `$KV.vm.<node>.>` like `watch`, through the node's durable consumer.

        All processes with the node's credentials share this consumer. A list of one process rewinds
        the consumer for all. So the watch awaits `gate` before each list.
        """

    async def fill(self, bucket: str) -> float:
        """Return the fill of a bucket (`vm`, `st`, …): bytes divided by max_bytes."""

    async def extent(self, subject_filter: str) -> Extent:
        """Return the size of the stream that stores `subject_filter`."""

    async def trim(self, subject_filter: str, *, keep: int = 0) -> None:
        """Remove messages of `subject_filter` without purge markers; keep the newest `keep`."""

    async def report(self) -> list[StreamReport]:
        """Return the state of all streams and their consumers.

        The user needs the permission for STREAM.LIST and CONSUMER.LIST.
        """

    # --- events ------------------------------------------------------------------------------
    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        """Store an event in the background, with retries. The queue of events is bounded.

        Within ten minutes, this connection stores events with the same subject and `message_id`
        only once. Two processes may store the same event, so readers compare the ids. An event
        that is too large loses details and parts of its texts (`schemas.fitting`).
        """

    def history(
        self, subject_filter: str, *, after: int = 0, limit: int = 500
    ) -> Awaitable[list[StoredMessage]]:
        """Return the stored events of a filter with a sequence above `after`, in order.

        The result has at most `limit` events and about HISTORY_BYTES. For further events, call
        again with `after` set to the last sequence.

        Raises:
            UnavailableError: no server answers for the stream in time.
        """

    async def aclose(self) -> None:
        """Store queued events within 2 s, stop all tasks, disconnect."""
