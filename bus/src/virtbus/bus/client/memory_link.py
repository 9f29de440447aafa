"""Routes core messages in memory, between the MemoryLinks of a MemoryServer."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from virtbus.bus.client.filters import matches
from virtbus.bus.client.link import LinkLostError, Raw, Receive, Subscription
from virtbus.bus.client.memory_stream import MAX_PAYLOAD_BYTES, MemoryStream
from virtbus.bus.client.owners import REQUEST_INFO
from virtbus.bus.client.ports import StoredMessage
from virtbus.bus.client.records import stream_of
from virtbus.bus.errors import FullError, UnavailableError
from virtbus.bus.runtime.tasks import wait_for_event

Result = TypeVar("Result")


class _Subscribed:
    def __init__(self, link: "MemoryLink", subject: str, queue: str, receive: Receive) -> None:
        self.link = link
        self.subject = subject
        self.queue = queue
        self.receive = receive

    async def close(self) -> None:
        self.link.server.subscribed.remove(self)


class MemoryServer:
    """The state of a fake NATS server.

    All TTLs use `clock_ns`. A test advances this clock and then calls `expire()`.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.clock_ns = clock_ns
        self.shelves: dict[str, MemoryStream] = {}
        self.subscribed: list[_Subscribed] = []
        self.stored: dict[str, list[StoredMessage]] = {}
        self.drop: Callable[[str], bool] = lambda _: False
        """Gets the subject of a core message, and returns True to lose the message."""

    def shelf(self, key: str) -> MemoryStream:
        stream = stream_of(key)
        if stream not in self.shelves:
            markers = stream == "KV_lease"
            self.shelves[stream] = MemoryStream(self.clock_ns, markers=markers)
        return self.shelves[stream]

    def expire(self) -> None:
        for shelf in self.shelves.values():
            shelf.expire()

    def route(self, raw: Raw) -> bool:
        """Deliver a message to each plain subscription and to one member of each queue group.

        Return False without a subscriber. A message that `drop` loses counts as delivered.
        """
        if self.drop(raw.subject):
            return True
        groups: dict[str, _Subscribed] = {}
        chosen: list[_Subscribed] = []
        for one in self.subscribed:
            if not one.link.connected or not matches(one.subject, raw.subject):
                continue
            if not one.queue:
                chosen.append(one)
            elif one.queue not in groups:
                groups[one.queue] = one
        for one in groups.values():  # the next message goes to the next member
            self.subscribed.remove(one)
            self.subscribed.append(one)
        loop = asyncio.get_running_loop()
        for one in (*chosen, *groups.values()):
            loop.call_soon(one.receive, raw)
        return bool(chosen or groups)


class MemoryLink:
    """A `Link` to a MemoryServer."""

    def __init__(self, server: MemoryServer, account: str = "") -> None:
        """Connect with the NATS account `account`; empty means the controllers' own account."""
        self.server = server
        self.account = account
        self.generation = 1
        self.clustered = False
        self._changed: dict[Callable[[], None], None] = {}
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._up = asyncio.Event()
        self._up.set()
        self._inboxes = 0

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    def inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{id(self):x}.{self._inboxes}"

    def on_change(self, notify: Callable[[], None]) -> Callable[[], None]:
        self._changed[notify] = None
        return lambda: self._changed.pop(notify, None)

    def cut(self) -> None:
        self._up.clear()
        for future in tuple(self._waiting):
            if not future.done():
                future.set_exception(LinkLostError("the connection ended before the answer came"))
        self._tell()

    def join(self) -> None:
        self.generation += 1
        self._up.set()
        self._tell()

    def _tell(self) -> None:
        for notify in tuple(self._changed):
            notify()

    async def up(self, timeout_s: float) -> None:
        if self.connected:
            return
        if not await wait_for_event(self._up, max(0.0, timeout_s)):
            msg = "no connection to the bus"
            raise UnavailableError(msg)

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        if not self.connected:
            msg = "no connection to the bus"
            raise UnavailableError(msg)
        if len(body) > MAX_PAYLOAD_BYTES:
            msg = f"{len(body)} bytes are more than the bus takes ({MAX_PAYLOAD_BYTES})"
            raise FullError(msg)
        all_headers = dict(headers or {})
        if self.account:
            all_headers[REQUEST_INFO] = json.dumps({"acc": self.account})
        if not self.server.route(Raw(subject, body, reply, all_headers)) and reply:
            self.server.route(Raw(reply, headers={"Status": "503"}))

    async def ask(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Raw:
        future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        inbox = self.inbox()

        def receive(raw: Raw) -> None:
            if not future.done():
                future.set_result(raw)

        subscription = await self.open(inbox, receive)
        try:
            await self.send(subject, body, headers=headers, reply=inbox)
            return await self.awaited(future, timeout_s)
        finally:
            await subscription.close()

    async def awaited(self, answer: "asyncio.Future[Result]", timeout_s: float) -> Result:
        """Return the awaited answer.

        Raises:
            LinkLostError: the connection ended before the answer came.
            TimeoutError: no answer came within `timeout_s`.
        """

        def late() -> None:
            if not answer.done():
                answer.set_exception(TimeoutError())

        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), late)
        self._waiting[answer] = None
        try:
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(answer, None)

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> Subscription:
        subscribed = _Subscribed(self, subject, queue, receive)
        self.server.subscribed.append(subscribed)
        return subscribed
