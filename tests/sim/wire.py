"""The simulated wire: connections that delay, stall, break, lose and repeat; a faulty server.

A connection is two queues, one each way, as in TCP. Messages arrive in order, later, and
messages in transit are lost when the connection breaks. Messages of different connections
interleave freely.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.sim.loop import Process, VirtualLoop

from virtbus.bus.client.filters import matches
from virtbus.bus.client.link import Raw, Receive
from virtbus.bus.client.memory_link import MemoryLink, MemoryServer
from virtbus.bus.client.memory_stream import MemoryStream
from virtbus.bus.client.records import stream_of
from virtbus.bus.errors import UnavailableError


@dataclass
class Weather:
    """Message faults of network and bus, as probabilities; the nemesis sets them."""

    delay_s: tuple[float, float] = (0.0002, 0.003)
    slow: float = 0.0
    """A message takes up to 1.5 s."""
    drop_core: float = 0.0
    repeat_core: float = 0.0
    lose_request: float = 0.0
    """A request to JetStream is lost: the write's outcome is unknown, and it did not happen."""
    lose_answer: float = 0.0
    """Its answer is lost: the outcome is unknown, and it happened."""


class Gone(asyncio.CancelledError):
    """The requesting process is dead."""


@dataclass(eq=False)
class Subscribed:
    """A subscription of one connection."""

    link: "SimLink"
    subject: str
    queue: str
    receive: Receive

    def __post_init__(self) -> None:
        self.head = self.subject.partition("*")[0].rstrip(">")
        """The common prefix of all its subjects: a quick test for a mismatch."""

    async def close(self) -> None:
        self.link.server.unsubscribe(self)


class SimServer(MemoryServer):
    """State and behaviour of a NATS cluster."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        super().__init__(loop.now_ns)
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.literal: dict[str, list[Subscribed]] = {}
        self.wild: list[Subscribed] = []
        self.leaderless_until_s = 0.0
        self.wrote: Callable[[str, Any], None] = lambda _what, _entry: None
        self.moving: frozenset[str] = frozenset()
        """Uids that a batch in progress writes again: its purge is half of a move."""
        self.denied: Callable[[str], None] = lambda _what: None
        self.full: Literal["", "refuses", "mute"] = ""
        """No write of records: it is refused (a limit), or never answered (NATS on a full disk)."""
        self.hollow = False
        """Nodes get empty lists and no changes, as from a recreated bus: it must delete nothing."""
        self.links = 0
        """The number of inboxes so far: no two are equal."""
        self.watches: list[Callable[[], None]] = []
        """Callbacks that make each watch list again."""

    def shelf(self, key: str) -> MemoryStream:
        """Return the bucket of a key; make it at first use."""
        stream = stream_of(key)
        if stream not in self.shelves:
            markers = stream in {"KV_node", "KV_lease"}
            shelf = self.shelves[stream] = MemoryStream(self.loop.now_ns, markers=markers)
            shelf.seen.append(lambda entry: self.wrote(stream, entry))
        return self.shelves[stream]

    def lose_leader(self, for_s: float) -> None:
        """No write and no read of records for that long; then every watch lists again."""
        until_s = self.loop.time() + for_s
        if until_s > self.leaderless_until_s:
            self.leaderless_until_s = until_s
            self.loop.outside(until_s, self._elected)

    def _elected(self) -> None:
        if self.loop.time() >= self.leaderless_until_s:
            self.relist()

    def relist(self) -> None:
        """Every watch lists again."""
        for again in tuple(self.watches):
            again()

    def empty(self, for_s: float) -> None:
        """Appear empty for that long."""
        self.hollow = True
        self.relist()
        self.loop.outside(self.loop.time() + for_s, self.fill)

    def fill(self) -> None:
        """Have everything again."""
        if self.hollow:
            self.hollow = False
            self.relist()

    def free(self) -> None:
        """The disk is no longer full."""
        self.full = ""

    def when_led(self, work: Callable[[], None], before_s: float = math.inf) -> None:
        """Run `work` as the leader, now or after the election, as for a client that retries."""
        if self.loop.time() >= self.leaderless_until_s:
            work()
            return
        later_s = self.leaderless_until_s + self.rng.uniform(0.0, 0.5)
        if later_s < before_s:
            self.loop.outside(later_s, lambda: self.when_led(work, before_s))

    # --- core -----------------------------------------------------------------------------
    def subscribe(self, one: Subscribed) -> None:
        """Deliver to it from now on."""
        if "*" in one.subject or one.subject.endswith(">"):
            self.wild.append(one)
        else:
            self.literal.setdefault(one.subject, []).append(one)

    def unsubscribe(self, one: Subscribed) -> None:
        """Deliver nothing more to it."""
        if one in self.wild:
            self.wild.remove(one)
        there = self.literal.get(one.subject, [])
        if one in there:
            there.remove(one)
            if not there:
                del self.literal[one.subject]

    def close(self, link: "SimLink") -> None:
        """Forget all subscriptions and watches of a dead process."""
        for stop in link.at_death:
            stop()
        for one in [*self.wild, *(s for there in self.literal.values() for s in there)]:
            if one.link is link:
                self.unsubscribe(one)

    def route(self, raw: Raw) -> bool:
        """Deliver a core message to every subscription and to one of each queue group."""
        groups: dict[str, list[Subscribed]] = {}
        chosen: list[Subscribed] = []
        subject = raw.subject
        there = self.literal.get(subject, [])
        wild = (w for w in self.wild if subject.startswith(w.head) and matches(w.subject, subject))
        for one in (*there, *wild):
            if not one.link.connected:
                continue
            if one.queue:
                groups.setdefault(one.queue, []).append(one)
            else:
                chosen.append(one)
        chosen += [members[self._one_of(len(members))] for members in groups.values()]
        for one in chosen:
            one.link.deliver(lambda one=one: one.receive(raw), core=True)  # type: ignore[misc]  # bound now
        if not chosen and raw.reply:
            self.route(Raw(raw.reply, headers={"Status": "503"}))
        return bool(chosen)

    def _one_of(self, count: int) -> int:
        return int(self.rng.random() * count) if count > 1 else 0


class SimLink(MemoryLink):
    """One process's connection."""

    server: SimServer

    def __init__(self, server: SimServer, process: Process) -> None:
        super().__init__(server)
        self.clustered = True
        self.process = process
        self._loop = server.loop
        self._rng = server.rng
        self._out_s = self._in_s = 0.0
        self._stalled_until_s = 0.0
        self._number = server.links = server.links + 1
        self.at_death: list[Callable[[], None]] = []

    # --- faults ---------------------------------------------------------------------------
    def cut(self) -> None:
        """Break the connection."""
        if self._up.is_set():
            self.generation += 1
            super().cut()

    def join(self) -> None:
        """Be connected again."""
        if self._up.is_set() or not self.process.alive:
            return
        self._stalled_until_s = 0.0
        self._out_s = self._in_s = 0.0
        super().join()

    def stall(self, for_s: float) -> None:
        """Half-open: no message arrives for a while, then all of them."""
        self._stalled_until_s = max(self._stalled_until_s, self._loop.time() + for_s)

    def _tell(self) -> None:
        for notify in tuple(self._changed):
            self._loop.call_soon(notify, context=self.process.context)

    # --- moving messages ------------------------------------------------------------------
    def alive(self) -> None:
        """Raise if the requesting process is dead: it runs only to be unwound."""
        if self._loop.over or not self.process.alive:
            raise Gone

    def _delay_s(self) -> float:
        weather, draw = self.server.weather, self._rng.random
        least_s, most_s = weather.delay_s
        delay_s = least_s + (most_s - least_s) * draw()
        if weather.slow and draw() < weather.slow:
            delay_s += 1.5 * draw()
        return delay_s

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` on the server once the message has arrived there."""
        generation = self.generation
        now_s = self._loop.time()
        self._out_s = max(self._out_s + 1e-7, now_s + self._delay_s(), self._stalled_until_s)

        def arrive() -> None:
            if self.generation == generation:
                work()

        self._loop.outside(self._out_s, arrive)

    def deliver(self, work: Callable[[], None], *, core: bool = False) -> None:
        """Run `work` in this process once the message has arrived here."""
        weather, rng = self.server.weather, self._rng
        if core and weather.drop_core and rng.random() < weather.drop_core:
            return
        copies = 1
        if core and weather.repeat_core and rng.random() < weather.repeat_core:
            copies = 2
        generation = self.generation

        def arrive() -> None:
            if self.generation == generation:
                work()

        for _ in range(copies):
            now_s = self._loop.time()
            self._in_s = max(self._in_s + 1e-7, now_s + self._delay_s(), self._stalled_until_s)
            self._loop.call_at(self._in_s, arrive, context=self.process.context)

    # --- Link -----------------------------------------------------------------------------
    @property
    def connected(self) -> bool:
        return self._up.is_set() and self.process.alive

    def inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{self.process.name}-{self._number}.{self._inboxes}"

    async def up(self, timeout_s: float) -> None:
        self.alive()
        await super().up(timeout_s)

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        self.alive()
        if not self._up.is_set():
            msg = "no connection to the bus"
            raise UnavailableError(msg)
        raw = Raw(subject, body, reply, dict(headers or {}))
        self.submit(lambda: self.server.route(raw))

    async def open(self, subject: str, receive: Receive, *, queue: str = "") -> Subscribed:
        self.alive()
        subscribed = Subscribed(self, subject, queue, receive)
        self.server.subscribe(subscribed)
        return subscribed
