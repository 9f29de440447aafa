"""Manages connections to libvirtd: one for each concurrent call.

A blocking call delays the other calls on its connection. libvirtd serves only five calls of a
connection at once (`max_client_requests`). libvirt's client before 10.0 may lose the wake-up of the
thread that owns the socket. On 9.0, all calls on a connection waited while one call hung. The fix
is the commit "rpc: fix race in waking up client event loop".
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

import libvirt

from virtbus.nodeagent.edge.libvirt_calls import Threads
from virtbus.nodeagent.edge.libvirt_errors import is_down, translated
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
OPEN_TIMEOUT_S = 10.0
FAIL_FAST_S = 0.2
"""Time after a failed connect in which further connects fail at once."""
KEEPALIVE = (5, 3)
"""Seconds between keepalive probes, and the number of answers that may be missing. With these
values, libvirt's client notices a hang in 20 s."""


class LibvirtLink:
    """A connection and its number of calls. `lost` is called when libvirt closes the connection."""

    connection: libvirt.virConnect

    def __init__(self, lost: Callable[[], None] | None = None) -> None:
        self.calls = 0
        self.connected = self.dead = False
        self.lost = lost


class LibvirtLinks:
    """The connections of one kind of work, with at most `at_once` calls in flight.

    Calls are refused while `stuck_limit` calls of all kinds of work hang in `threads`.
    """

    def __init__(self, uri: str, threads: Threads, *, at_once: int, stuck_limit: int) -> None:
        self._uri = uri
        self._threads = threads
        self._places = asyncio.Semaphore(at_once)
        self._stuck_limit = stuck_limit
        # Each connection to libvirt's test driver, which is in this process, is a separate host.
        self._in_process = uri.startswith("test:///")
        self._links: list[LibvirtLink] = []
        self._opening = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._refused: tuple[float, VirtbusError] | None = None

    async def run(
        self,
        work: Callable[[libvirt.virConnect], Result],
        doing: str,
        *,
        timeout_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> Result:
        """Return the result of `work` on a connection without other calls.

        `doing` names the operation in errors. `ended` runs once, on the loop, when `work` has
        ended, however late, or if `work` cannot begin.

        Raises:
            VirtbusError: 503 `libvirt_down`: libvirt cannot be reached. 503 `libvirt_stuck`: `work`
                takes longer than `timeout_s`, or too many calls hang. Other errors of libvirt:
                as `translated`.
        """
        try:
            link = await self._taken()
        except BaseException:
            ended()
            raise
        link.calls += 1

        def left() -> None:
            self._left(link)
            ended()

        try:
            return await self._threads.call(
                lambda: work(link.connection),
                timeout_s=timeout_s,
                settled=self._places.release,
                ended=left,
            )
        except libvirt.libvirtError as error:
            if is_down(error):
                self.drop(link)
            raise translated(error, doing) from error

    async def _taken(self) -> LibvirtLink:
        if self._threads.stuck >= self._stuck_limit:
            message = "libvirt does not answer; restart libvirtd, guests keep running meanwhile"
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_stuck", message, after_ms=5000)
        await self._places.acquire()
        try:
            return await self._idle_one()
        except BaseException:
            self._places.release()
            raise

    async def reserve(
        self, prepare: Callable[[libvirt.virConnect], None], *, lost: Callable[[], None]
    ) -> None:
        """Open a connection, run `prepare` on it in a thread, and keep it open.

        `lost` runs when the connection is lost. The test driver has one shared connection, which is
        never lost.
        """
        async with self._opening:
            if self._in_process and self._links:
                connection = self._links[0].connection
                await self._threads.call(lambda: prepare(connection), timeout_s=OPEN_TIMEOUT_S)
            else:
                await self._open(LibvirtLink(lost), prepare)

    async def _open(
        self, link: LibvirtLink, prepare: Callable[[libvirt.virConnect], None] | None = None
    ) -> LibvirtLink:
        if self._refused is not None and self._loop.time() < self._refused[0]:
            raise VirtbusError.of(self._refused[1].body)

        def late() -> None:
            if link.dead and link.connected:
                self._close(link)

        try:
            await self._threads.call(
                lambda: self._connect(link, prepare), timeout_s=OPEN_TIMEOUT_S, ended=late
            )
            self._links.append(link)
        except libvirt.libvirtError as error:
            problem = translated(error, "connect to libvirt", connecting=True)
            self._refused = self._loop.time() + FAIL_FAST_S, problem
            raise problem from error
        except VirtbusError as stuck:
            self._refused = self._loop.time() + OPEN_TIMEOUT_S, stuck
            raise
        finally:
            link.dead = link not in self._links  # if dead, `late` closes a connection that opens
        return link

    def _connect(
        self, link: LibvirtLink, prepare: Callable[[libvirt.virConnect], None] | None
    ) -> None:
        connection = libvirt.open(self._uri)
        try:
            if not self._in_process:
                connection.setKeepAlive(*KEEPALIVE)
                connection.registerCloseCallback(self._closed, link)
            if prepare is not None:
                prepare(connection)
        except BaseException:
            connection.close()
            raise
        link.connection, link.connected = connection, True

    def _closed(self, _connection: libvirt.virConnect, _reason: int, link: LibvirtLink) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(self._lost, link)

    def _lost(self, link: LibvirtLink) -> None:
        self.drop(link)
        if link.lost is not None:
            link.lost()

    def drop(self, link: LibvirtLink) -> None:
        """Stop the use of the connection, and close it after its last call."""
        if link.dead:
            return
        link.dead = True
        if link in self._links:
            self._links.remove(link)
        if link.calls == 0:
            self._close(link)

    def close(self) -> None:
        for link in list(self._links):
            self.drop(link)

    async def _idle_one(self) -> LibvirtLink:
        if (found := self._free()) is not None:
            return found
        async with self._opening:
            return self._free() or await self._open(LibvirtLink())

    def _free(self) -> LibvirtLink | None:
        return next((one for one in self._links if self._in_process or one.calls == 0), None)

    def _left(self, link: LibvirtLink) -> None:
        link.calls -= 1
        if link.dead and link.calls == 0:
            self._close(link)

    def _close(self, link: LibvirtLink) -> None:
        with contextlib.suppress(libvirt.libvirtError):
            link.connection.close()
