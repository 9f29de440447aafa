"""Watches keys by pull requests: a list, SYNCED, then changes. After any fault it lists again.

nats-py's own watch stops at a server restart, and loses messages silently. Here, a pull request
with an idle heartbeat is always open. After a gap, a missed heartbeat, a new connection or an error
status, the watch rewinds its consumer and lists again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Protocol

from virtbus.bus.client.link import Link, Raw, Subscription
from virtbus.bus.client.mailbox import Mailbox
from virtbus.bus.client.ports import Entry, Gate, WatchMark
from virtbus.bus.client.records import entry_of
from virtbus.bus.errors import BusError, DeniedError
from virtbus.bus.runtime.backoff import delays

log = logging.getLogger(__name__)

BATCH = 512
EXPIRES_S = 30.0
BRIEF_EXPIRES_S = 5.0
"""Expiry of a pull that might receive messages of a later list (see `WatchSource`)."""
HEARTBEAT_S = 2.0
"""Interval of the server's idle heartbeats. Most messages of an idle bus are such heartbeats."""
SILENCE_S = 4.4
"""After this silence, consumer or connection count as lost: two heartbeats and a margin."""
SILENT_PARTS = 2
"""Number of waits for SILENCE_S in total. Each wait is longer than HEARTBEAT_S, so that only
heartbeats wake the process of an idle watch.

After a pause of this process, a timer expires before pending messages are read. With a single wait,
each watch on a busy machine would then request a full list.
"""
UP_S = 60.0


class WatchSource(Protocol):
    """A consumer on the server, from which a watch pulls.

    `stays` is True for a durable consumer. A cluster serves earlier pulls of this consumer until
    they expire, even if their connection is gone. So earlier pulls can receive messages of a new
    list.
    """

    stays: bool

    @property
    def pull_subject(self) -> str: ...

    async def rewind(self) -> int:
        """Let the consumer deliver the list again; return the list's number of messages."""

    async def close(self) -> None:
        """Delete the consumer if `stays` is False."""


class _Doubt(StrEnum):
    """The reason for a new list."""

    START = "start"
    ASKED = "asked"
    GAP = "gap"
    SILENT = "silent"
    LINK = "new connection"
    REFUSED = "refused by the server"


_PULLED = frozenset({_Doubt.ASKED, _Doubt.GAP})
"""Reasons that leave the earlier pulls open."""
_AT_ONCE = frozenset({_Doubt.START, _Doubt.ASKED, _Doubt.LINK})
"""Reasons without a pause before the list, because the server is not at fault."""


class PullWatch:
    """A `ports.Watch`.

    It works inside the reader's `async for`, without a task. So a slow reader slows the pulls.
    """

    def __init__(
        self, link: Link, source: WatchSource, name: str, gate: Gate | None = None
    ) -> None:
        self._link = link
        self._gate = gate
        self._source = source
        self._name = name
        self._raws: Mailbox[Raw] = Mailbox(4 * BATCH)
        self._ready: deque[Entry | WatchMark] = deque()
        self._doubt: _Doubt | None = _Doubt.START
        self._pauses = delays(0.05, 5.0)
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._generation = 0
        self._left = 0
        self._next_sequence = 1
        self._synced = False
        self._listed_yet = 0
        """Number of the list's messages that have not arrived yet."""
        self._drained = False
        """True once a message had no successor. Messages of the list that are still missing were
        deleted, or newer messages have replaced them and follow. The server counts a replacement a
        little later than the removal.
        """
        self._begun_s = 0.0

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        return self

    async def __anext__(self) -> Entry | WatchMark:
        while not self._ready:
            if self._doubt is None:
                await self._follow()
            else:
                await self._begin(self._doubt)
        return self._ready.popleft()

    def relist(self) -> None:
        self._doubt = self._doubt or _Doubt.ASKED
        self._raws.wake()

    def changed(self) -> None:
        self._doubt = _Doubt.LINK
        self._raws.wake()

    async def _begin(self, why: _Doubt) -> None:
        try:
            if why not in _AT_ONCE:
                await asyncio.sleep(next(self._pauses))
            if why is not _Doubt.START:
                log.info(
                    "watch %s starts a new list: %s", self._name, why, extra={"code": "relist"}
                )
            await self._link.up(UP_S)
            if self._gate is not None:
                await self._gate()
            await self._listen(why)
            waiting = await self._source.rewind()
            if self._left <= BATCH // 2:
                await self._pull()
        except DeniedError:
            self._doubt = _Doubt.REFUSED
            raise
        except (BusError, TimeoutError) as error:
            self._doubt = _Doubt.REFUSED
            log.warning(
                "watch %s will be retried: %s", self._name, error, extra={"code": "watch_waits"}
            )
            return
        self._listed_yet = waiting
        self._begun_s = asyncio.get_running_loop().time()
        self._ready.append(WatchMark.RESET)
        if waiting == 0:
            self._sync()

    async def _listen(self, why: _Doubt) -> None:
        """Drop received messages and subscribe to an inbox.

        Earlier pulls of a durable consumer still deliver to their inbox. So the inbox stays the
        same as long as the connection.
        """
        if why is _Doubt.LINK or not self._source.stays:
            await self.close()
        self._doubt = None
        self._generation = self._link.generation
        self._raws.clear()
        self._synced, self._drained, self._next_sequence = False, False, 1
        if self._subscription is None:
            self._inbox = self._link.inbox()
            self._subscription = await self._link.open(self._inbox, self._raws.put)
            self._left = 0
        elif why not in _PULLED:
            self._left = 0

    def _sync(self) -> None:
        self._synced = True
        self._pauses = delays(0.05, 5.0)
        self._ready.append(WatchMark.SYNCED)

    async def _pull(self) -> None:
        self._left += BATCH
        brief = self._source.stays and self._link.clustered
        expires_s = BRIEF_EXPIRES_S if brief else EXPIRES_S
        await self._link.send(
            self._source.pull_subject,
            b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}'
            % (BATCH, int(expires_s * 1e9), int(HEARTBEAT_S * 1e9)),
            reply=self._inbox,
        )

    async def _follow(self) -> None:
        if await self._silent():
            self._doubt = _Doubt.SILENT
        if self._link.generation != self._generation or not self._link.connected:
            self._doubt = _Doubt.LINK
        if self._raws.overflowed:
            self._doubt = _Doubt.GAP
        raw = self._raws.take()
        if self._doubt is not None or raw is None:
            return
        try:
            if raw.status:
                await self._control(raw)
            else:
                self._data(raw)
                if self._left <= BATCH // 2:
                    await self._pull()
        except BusError:
            self._doubt = _Doubt.LINK

    async def _silent(self) -> bool:
        for _ in range(SILENT_PARTS):
            if await self._raws.wait(SILENCE_S / SILENT_PARTS):
                return False
        return True

    async def _control(self, raw: Raw) -> None:
        match raw.status:
            case "100":
                if not (self._synced or self._drained) and self._listed_yet > 0:
                    # A heartbeat follows HEARTBEAT_S without a message. An older list has then lost
                    # messages. For a younger list, the heartbeat proves nothing.
                    if not self._just_begun:
                        self._doubt = _Doubt.GAP
                elif not self._synced:
                    self._sync()
            case "408":
                pending = raw.headers.get("Nats-Pending-Messages", "")
                self._left -= (
                    int(pending) if pending.isascii() and pending.isdigit() else self._left
                )
                if self._left <= BATCH // 2:
                    self._left = max(0, self._left)
                    await self._pull()
            case "409" if "MaxWaiting" in raw.headers.get("Description", ""):
                self._left = BATCH  # enough earlier pulls are open
            case _:
                self._doubt = _Doubt.REFUSED

    def _data(self, raw: Raw) -> None:
        # $JS.ACK[.<domain>.<account>].<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>
        # .<time>.<pending>[.<random>]: nine tokens, or more with a domain (ADR-15)
        tokens = raw.reply.split(".")
        first = 5 if len(tokens) <= 9 else 7
        try:
            sequence, consumer_sequence, at_ns, pending = map(int, tokens[first : first + 4])
        except ValueError:  # the subject is garbled; a new list repeats the message
            self._doubt = _Doubt.GAP
            return
        self._left -= 1
        if consumer_sequence != self._next_sequence:
            if self._next_sequence > 1 or self._listed_yet <= 0 or not self._just_begun:
                self._doubt = _Doubt.GAP
            return  # if this is no gap, the message belongs to the previous list
        self._next_sequence += 1
        self._listed_yet -= 1
        self._ready.append(entry_of(raw.subject, raw.headers, raw.body, sequence, at_ns))
        self._drained = self._drained or pending == 0
        if self._drained and self._listed_yet <= 0 and not self._synced:
            self._sync()

    @property
    def _just_begun(self) -> bool:
        """Return True while messages may belong to the previous list."""
        return asyncio.get_running_loop().time() - self._begun_s < HEARTBEAT_S

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.close()


@asynccontextmanager
async def watching(
    link: Link, source: WatchSource, name: str, gate: Gate | None = None
) -> AsyncIterator[PullWatch]:
    """Open a watch that lists again after a reconnect. The exit deletes an ephemeral consumer."""
    watch = PullWatch(link, source, name, gate)
    forget = link.on_change(watch.changed)
    try:
        yield watch
    finally:
        forget()
        await watch.close()
        if link.connected:
            with suppress(BusError, TimeoutError):
                async with asyncio.timeout(1):
                    await source.close()
