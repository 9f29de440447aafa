"""`ports.Bus` over the simulated wire: requests and services are the product's own code.

Records behave as JetStream's do: a write is answered after it was stored. After a lost
connection the client repeats it under the same message id. A write without an answer in time is
*unknown*.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from tests.sim.wire import SimLink, SimServer

from virtbus.bus.client.filters import matches
from virtbus.bus.client.link import LinkLostError
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.memory_stream import MemoryStream
from virtbus.bus.client.ports import Entry, Watch, WatchMark
from virtbus.bus.errors import (
    BusError,
    DeniedError,
    FullError,
    OutcomeUnknownError,
    UnavailableError,
)
from virtbus.bus.provisioning.permissions import Role
from virtbus.bus.runtime.sources import Sources

CAPACITY = 65_536
WRITE_TIMEOUT_S = 5.0


def sources_of(link: SimLink, skew_ns: Callable[[], int]) -> Sources:
    """Clock (which may err by `skew_ns`), randomness and ids of one process."""
    rng: random.Random = link.server.rng
    loop = link.server.loop

    def time_ns() -> int:
        return loop.shown_ns() + skew_ns()

    def uuid7() -> str:
        value = time_ns() // 1_000_000 << 80 | rng.getrandbits(80)
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        text = f"{value & (1 << 128) - 1:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    return Sources(time_ns=time_ns, uniform=rng.uniform, uuid7=uuid7, secret=rng.randbytes)


@lru_cache(maxsize=4096)
def allowed(role: Role, subject: str) -> bool:
    """Return True if the server would accept a message of this role on `subject`."""
    return any(matches(one, subject) for one in role.publish)


class SimWatch:
    """Implements `ports.Watch`."""

    def __init__(self, link: SimLink, filters: tuple[str, ...]) -> None:
        self._link = link
        self._server = link.server
        self._filters = filters
        self._of_node = filters[0].startswith("$KV.vm.n")
        # Nearly every filter of the product's watches is `<prefix>.>`: this is the quick way to
        # match it.
        plain = [one for one in filters if one.endswith(".>") and "*" not in one]
        self._prefixes = tuple(one.removesuffix(">") for one in plain)
        self._others = tuple(one for one in filters if one not in plain)
        self._items: Mailbox[Entry | WatchMark] = Mailbox(CAPACITY)
        self._shelf: MemoryStream = link.server.shelf(filters[0])
        self._list = 0
        self._following = 0

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        return self._items

    def relist(self) -> None:
        self._link.alive()
        self.begin()

    def begin(self) -> None:
        """Request a list; messages of an earlier one are dropped."""
        self._list += 1
        number = self._list
        if self._link.connected:
            self._link.submit(lambda: self._server.when_led(lambda: self._listed(number)))

    def _listed(self, number: int) -> None:
        """On the server: send the current list, then every change."""
        if number != self._list or not self._link.connected:
            return
        self._following = number
        self._send(WatchMark.RESET, number)
        for entry in () if self._hollow else self._shelf.listed(self._filters):
            self._send(entry, number)
        self._send(WatchMark.SYNCED, number)

    @property
    def _hollow(self) -> bool:
        """A recreated bus has neither the old values nor the changes of the former one."""
        return self._server.hollow and self._of_node

    def _send(self, item: Entry | WatchMark, number: int) -> None:
        def arrive() -> None:
            if number == self._list:
                self._items.put(item)

        self._link.deliver(arrive)

    def seen(self, entry: Entry) -> None:
        """On the server: a value was written."""
        if self._following != self._list or self._hollow:
            return
        if entry.key.startswith(self._prefixes) or any(matches(f, entry.key) for f in self._others):
            self._send(entry, self._list)

    def start(self) -> Callable[[], None]:
        """List and follow; return a function that ends it."""
        self._shelf.seen.append(self.seen)
        self._server.watches.append(self.begin)
        forget = self._link.on_change(self.begin)
        self.begin()

        def stop() -> None:
            self._list += 1
            forget()
            if self.seen in self._shelf.seen:
                self._shelf.seen.remove(self.seen)
                self._server.watches.remove(self.begin)

        self._link.at_death.append(stop)
        return stop


class SimBus(MemoryBus):
    """One connection of one process; the contract of each method is in `ports.Bus`."""

    server: SimServer

    def __init__(self, link: SimLink, role: Role, skew_ns: Callable[[], int] = lambda: 0) -> None:
        super().__init__(link.server, link.process.name, sources_of(link, skew_ns), link)
        self.link = link
        self._role = role

    async def publish(self, subject: str, value: Any) -> None:
        self._may(subject)
        await super().publish(subject, value)

    # --- records --------------------------------------------------------------------------
    async def get(self, key: str) -> Entry | None:
        shelf = self.server.shelf(key)
        found: Entry | None = await self._asked(lambda: shelf.last(key), f"read {key}", write=False)
        return found

    async def _write(
        self,
        store: Callable[[], int],
        shelf: MemoryStream,
        keys: Sequence[str],
        ttl_s: float | None,
    ) -> int:
        for key in keys:
            self._may(key)
        uids = [key.rpartition(".")[2] for key in keys]

        def stored() -> int:
            self.server.moving = frozenset(uid for uid in uids if uids.count(uid) > 1)
            revision = store()
            self.server.moving = frozenset()
            self._expire_later(shelf, ttl_s)
            return revision

        revision: int = await self._asked(stored, f"write {keys[-1]}", write=True)
        return revision

    def _may(self, subject: str) -> None:
        self.link.alive()
        if not allowed(self._role, subject):
            self.server.denied(f"{self._name} may not publish {subject}")
            msg = f"permissions violation for {subject}"
            raise DeniedError(msg)

    def _expire_later(self, shelf: MemoryStream, ttl_s: float | None) -> None:
        if ttl_s is not None and ttl_s < 3600:
            loop = self.server.loop
            loop.outside(loop.time() + ttl_s + 0.001, shelf.expire)

    async def _asked(self, work: Callable[[], Any], what: str, *, write: bool) -> Any:
        """Send to JetStream until there is an answer or no time; raise as `ports.Bus.put` says."""
        link, loop = self.link, self.server.loop
        link.alive()
        deadline_s = loop.time() + WRITE_TIMEOUT_S
        once = _Once(work)
        sent, failure = False, ""
        while (left_s := deadline_s - loop.time()) > 0:
            try:
                await link.up(left_s)
                sent = True
                answer = await self._ask_once(once, deadline_s - loop.time(), write=write)
                link.alive()
                return answer()
            except LinkLostError as error:
                failure = str(error)
            except UnavailableError as error:
                failure = str(error)
                break
            except TimeoutError:
                failure = "no answer in time"
        if sent:
            msg = f"{what}: {failure}; it may have had an effect, repeat it with the same id"
            raise OutcomeUnknownError(msg)
        msg = f"{what}: {failure}"
        raise UnavailableError(msg)

    async def _ask_once(self, once: "_Once", timeout_s: float, *, write: bool) -> Any:
        link, server = self.link, self.server
        weather, rng = server.weather, server.rng
        answer: asyncio.Future[Any] = server.loop.create_future()

        def told(outcome: Callable[[], Any]) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def lead() -> None:
            if write and server.full == "mute":
                return
            outcome = _full if write and server.full else once.run()
            if not (write and weather.lose_answer and rng.random() < weather.lose_answer):
                link.deliver(lambda: told(outcome))

        if not (write and weather.lose_request and rng.random() < weather.lose_request):
            limit_s = server.loop.time() + timeout_s
            link.submit(lambda: server.when_led(lead, before_s=limit_s))
        return await link.awaited(answer, timeout_s)

    @asynccontextmanager
    async def watch(self, *filters: str) -> AsyncIterator[Watch]:
        self.link.alive()
        watch = SimWatch(self.link, filters)
        stop = watch.start()
        try:
            yield watch
        finally:
            stop()

    def _reachable(self) -> None:
        self.link.alive()
        super()._reachable()

    # --- facts ----------------------------------------------------------------------------
    def emit(self, subject: str, value: Any, *, message_id: str) -> None:
        """Events are for people: nothing in the system may depend on them, so they end here."""
        del value, message_id
        self._may(subject)


def _full() -> Any:
    msg = "maximum bytes exceeded"
    raise FullError(msg)


class _Once:
    """Store a write only once if it is repeated under its message id, with the same answer."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._outcome: Callable[[], Any] | None = None

    def run(self) -> Callable[[], Any]:
        """Apply it, or find it applied; return the outcome."""
        if self._outcome is None:
            self._outcome = self._tried()
        return self._outcome

    def _tried(self) -> Callable[[], Any]:
        try:
            result = self._work()
        except BusError as error:
            refusal = error

            def refuse() -> Any:
                raise refusal

            return refuse
        return lambda: result
